"""The grouped matrix product in Pallas-Triton: the contract in interpret mode, its tiles, and what it refuses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpus import GPUS
from pallas_kernels.grouped_matmul import cases, tiles, triton
from pallas_kernels.grouped_matmul.reference import grouped_matmul as reference
from pallas_kernels.grouped_matmul.tuning import Choice, candidates, choose, key
from pallas_kernels.kernel_case import KernelCase
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.matmul_cases import TOLERANCE, GroupedMatmulContract, draw

SMALL = Choice(rows=16, columns=16, depth=16, band=2, num_warps=4, num_stages=2)
SMALL_OP = partial(triton.grouped_matmul, interpret=True, choice=SMALL)
BF16 = jnp.dtype(jnp.bfloat16)


class TestGroupedMatmulTriton(GroupedMatmulContract):
    op = staticmethod(partial(triton.grouped_matmul, interpret=True))


class TestGroupedMatmulTritonManyTiles(GroupedMatmulContract):
    """Several tiles in every direction, the last ones of which are cut."""

    op = staticmethod(SMALL_OP)


@pytest.mark.parametrize(("O", "I", "dtype"), [(16, 40, jnp.float32), (40, 40, jnp.float16)])
def test_cut_columns_and_depth(O: int, I: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(O)
    x_TI, w_EOI = draw(rng, (50, I), dtype), draw(rng, (3, O, I), dtype)
    sizes_E = jnp.asarray([17, 0, 31], jnp.int32)
    got = jitted(SMALL_OP)(x_TI, w_EOI, sizes_E)
    want = reference(x_TI, w_EOI, sizes_E)
    arrays = (np.asarray(y, np.float32) for y in (got, want))
    np.testing.assert_allclose(*arrays, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_weights_of_experts_without_rows_are_not_used() -> None:
    rng = np.random.default_rng(0)
    x_TI, w_EOI = draw(rng, (20, 16), jnp.float32), draw(rng, (4, 24, 16), jnp.float32)
    sizes_E = jnp.asarray([0, 9, 0, 7], jnp.int32)
    op = jitted(SMALL_OP)
    want = np.asarray(op(x_TI, w_EOI, sizes_E))
    unused = jnp.asarray([0, 2])
    np.testing.assert_array_equal(np.asarray(op(x_TI, w_EOI.at[unused].set(jnp.nan), sizes_E)), want)


@pytest.mark.parametrize("sizes", [[60, 0, 0], [-5, 80, 2**30]])
def test_wrong_sizes_stay_inside_of_the_rows(sizes: list[int]) -> None:
    """More rows than there are, or less than none: no tile reaches past the arrays."""
    work = tiles.make(jnp.asarray(sizes, jnp.int32), 20, 16)
    last = np.minimum(np.asarray(work.first_P) + 16, np.asarray(work.stop_P))
    assert (last <= 20).all()
    assert (np.asarray(work.first_P) >= 0).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_the_batch(data: st.DataObject) -> None:
    """A row's bits are the same alone and among any others, at any place."""
    rng = np.random.default_rng(7)
    x_TI, w_EOI = draw(rng, (40, 48), jnp.float32), draw(rng, (3, 24, 48), jnp.float32)
    sizes = np.diff(sorted(data.draw(st.lists(st.integers(0, 40), min_size=3, max_size=3))), prepend=0)
    expert = data.draw(st.sampled_from([e for e in range(3) if sizes[e]] or [0]))
    if not sizes[expert]:
        return
    at = int(sizes[:expert].sum() + data.draw(st.integers(0, int(sizes[expert]) - 1)))
    alone_E = jnp.zeros(3, jnp.int32).at[expert].set(1)
    together = jitted(SMALL_OP)(x_TI, w_EOI, jnp.asarray(sizes, jnp.int32))[at]
    alone = jitted(SMALL_OP)(jnp.full_like(x_TI, jnp.nan).at[0].set(x_TI[at]), w_EOI, alone_E)[0]
    np.testing.assert_array_equal(np.asarray(together), np.asarray(alone))


class TestTiles:
    @settings(max_examples=60, deadline=None)
    @given(cuts=st.lists(st.integers(0, 60), min_size=5, max_size=5), T=st.sampled_from([60, 63]))
    def test_every_row_is_in_one_tile_of_its_expert(self, cuts: list[int], T: int) -> None:
        rows, sizes = 8, np.diff(sorted(cuts), prepend=0)
        made = jax.jit(tiles.make, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), T, rows)
        expert_P, first_P, stop_P = (np.asarray(x) for x in made)
        assert len(expert_P) == tiles.count(T, len(sizes), rows)
        owner = [
            (row, expert)
            for expert, first, stop in zip(expert_P, first_P, stop_P)
            for row in range(first, min(first + rows, stop))
        ]
        want = [e for e, size in enumerate(sizes) for _ in range(size)]
        want += [len(sizes)] * (T - len(want))
        assert owner == list(enumerate(want))

    @pytest.mark.parametrize(
        ("T", "E", "rows", "want"), [(128, 128, 16, 128), (1, 8, 16, 1), (64, 8, 16, 12)]
    )
    def test_count(self, T: int, E: int, rows: int, want: int) -> None:
        assert tiles.count(T, E, rows) == want


class TestTuning:
    @pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
    @pytest.mark.parametrize("T", [1, 128, 512, 16384])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_choices_fit_into_shared_memory(self, gpu: object, T: int, dtype: jnp.dtype) -> None:
        generation, limit = gpu.generation, gpu.shared_memory_per_block  # type: ignore[attr-defined]
        shape = (T, 128, 1536, 2048, dtype)
        assert candidates(generation, *shape)[0] == choose(generation, *shape)
        for c in candidates(generation, *shape):
            assert c.num_stages * (c.rows + c.columns) * c.depth * jnp.dtype(dtype).itemsize <= limit
            assert c.num_warps in (1, 2, 4, 8)

    def test_shapes_with_as_many_rows_per_expert_share_a_key(self) -> None:
        assert key(512, 128, 8, 16, BF16) == key(500, 128, 8, 16, BF16) == "bfloat16-o8-i16-e128-r4"
        assert key(513, 128, 8, 16, BF16) == "bfloat16-o8-i16-e128-r8"


class TestSupports:
    def test_what_the_engine_uses(self) -> None:
        assert self._supports() == (True, "")

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"x": jnp.int8}, "rows of int8"),
            ({"w": jnp.float32}, "weights of float32 for rows of bfloat16"),
            ({"sizes": jnp.uint32}, "group sizes of uint32"),
            ({"T": 0}, "nothing to multiply"),
        ],
    )
    def test_refuses(self, change: dict[str, Any], reason: str) -> None:
        ok, why = self._supports(**change)
        assert not ok
        assert reason in why

    def _supports(self, x: Any = BF16, w: Any = BF16, sizes: Any = jnp.int32, T: int = 8) -> tuple[bool, str]:
        shapes = (((T, 16), x), ((4, 24, 16), w), ((4,), sizes))
        return triton.supports(*(jax.ShapeDtypeStruct(s, d) for s, d in shapes))


class TestCases:
    def test_oracle_in_chunks_is_the_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cases, "ORACLE_BYTES", 3 * 4 * 24 * 16)
        rng = np.random.default_rng(0)
        x_TI, w_EOI = draw(rng, (20, 16), jnp.float32), draw(rng, (4, 24, 16), jnp.float32)
        sizes_E = jnp.asarray([5, 0, 9, 3], jnp.int32)
        want = reference(x_TI, w_EOI, sizes_E)
        np.testing.assert_allclose(cases.oracle(x_TI, w_EOI, sizes_E), want, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("case", cases.kernel_cases(), ids=lambda case: case.name)
    def test_traces(self, case: KernelCase) -> None:
        inputs = jax.eval_shape(case.inputs, jax.random.key(0))
        assert triton.supports(*inputs) == (True, "")
        want = jax.eval_shape(case.oracle, *inputs)
        for op in (case.baseline, *(case.build("hopper", choice) for choice in case.candidates)):
            assert op is not None
            assert jax.eval_shape(op, *inputs) == want

    def test_every_token_reaches_its_experts(self) -> None:
        sizes_E = cases.routed_rows(jax.random.key(0), cases.QWEN3, 64)
        assert int(sizes_E.sum()) == 64 * 8
        assert int(sizes_E.max()) <= 64

    def test_work_of_a_decode_step_is_mostly_weights(self) -> None:
        work = cases.least_work(cases.SHAPES[0])
        assert 80 * 1536 * 2048 * 2 < work.bytes < 90 * 1536 * 2048 * 2
        assert work.flops == 2 * 128 * 1536 * 2048
