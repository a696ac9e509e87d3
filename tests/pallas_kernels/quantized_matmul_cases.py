"""The contract of ``quantized_matmul``: every backend's test class inherits ``QuantizedMatmulContract``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.quantized_matmul import packing
from pallas_kernels.quantized_matmul.reference import quantized_matmul as reference
from pallas_kernels.quantized_matmul.weights import QuantizedWeight
from tests.pallas_kernels.compiled import jitted, options_for
from tests.pallas_kernels.picking import Picks, picked_shapes

Op = Callable[..., jax.Array]


@dataclass(frozen=True)
class Kind:
    """A format, and how to make it of random numbers ``[O, I]``."""

    name: str
    make: Callable[[np.ndarray], QuantizedWeight]


def _awq_like(w_OI: np.ndarray) -> QuantizedWeight:
    """Scales in float16, zero points 0 to 16, which GPTQ's version 1 can hold."""
    rng = np.random.default_rng(1)
    O, I = w_OI.shape
    G = -(-I // 128)
    return packing.assemble(
        rng.integers(0, 16, (O, I), dtype=np.uint8),
        rng.uniform(0.05, 0.2, (G, O)).astype(np.float16),
        rng.integers(0, 17, (G, O)).astype(np.int8),
        "int4",
        128,
    )


def _in_order(w: QuantizedWeight, inputs: int) -> QuantizedWeight:
    order_I = np.random.default_rng(2).permutation(inputs).astype(np.int32)
    return replace(w, order_I=jnp.asarray(order_I))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("int8", packing.quantize_int8),
        Kind("int8-g64", lambda w: packing.quantize_int8(w, 64)),
        Kind("int4", lambda w: packing.quantize_int4(w, None)),
        Kind("int4-g32-zero", lambda w: packing.quantize_int4(w, 32, zero_point=True)),
        Kind("int4-g64", lambda w: packing.quantize_int4(w, 64)),
        Kind("int4-g128", packing.quantize_int4),
        Kind("int4-g256-zero", lambda w: packing.quantize_int4(w, 256, zero_point=True)),
        Kind("awq", _awq_like),
        Kind("int4-ordered", lambda w: _in_order(packing.quantize_int4(w, 64, zero_point=True), w.shape[1])),
        Kind("fp8", lambda w: packing.quantize_fp8(w, None)),
        Kind("w8a8-fp8", packing.quantize_fp8),
        Kind(
            "w8a8-fp8-static",
            lambda w: packing.from_fp8(_fp8(w), np.full(1, 0.01, np.float32), np.full(1, 0.004, np.float32)),
        ),
        Kind("w8a8-int8", lambda w: packing.quantize_int8(w, activation="int8")),
    )
}

# Kinds whose parts occur in others: for the slow tests.
ALIKE = ("int8", "int4-g64", "int4-g256-zero", "w8a8-fp8")


@dataclass(frozen=True)
class Problem:
    """What a compiled product depends on."""

    kind: str
    T: int
    O: int
    I: int
    dtype: jnp.dtype
    bias: bool = False


def _fp8(w_OI: np.ndarray) -> np.ndarray:
    values: np.ndarray = np.asarray(jnp.asarray(w_OI * 50).astype(jnp.float8_e4m3fn))
    return values


def draw(
    kind: str, T: int, O: int, I: int, dtype: jnp.dtype, seed: int = 0
) -> tuple[jax.Array, QuantizedWeight]:
    """Activations, and a weight with products of about 1."""
    rng = np.random.default_rng(seed)
    w = KINDS[kind].make((rng.normal(size=(O, I)) / I**0.5).astype(np.float32))
    return jnp.asarray(rng.normal(size=(T, I)), dtype), jax.tree.map(jnp.asarray, w)


@lru_cache(maxsize=64)
def _jitted(op: Op, out_dtype: jnp.dtype | None) -> Op:
    return jax.jit(
        lambda x_TI, w, bias_O: op(x_TI, w, bias_O, out_dtype=out_dtype), compiler_options=options_for(op)
    )


def run(
    op: Op,
    x_TI: jax.Array,
    w: QuantizedWeight,
    bias_O: jax.Array | None = None,
    out_dtype: jnp.dtype | None = jnp.float32,
) -> np.ndarray:
    """The op, jitted as in a model, in float32."""
    return np.asarray(_jitted(op, out_dtype)(x_TI, w, bias_O).astype(jnp.float32))


class QuantizedMatmulContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod
    kinds: tuple[str, ...] = tuple(KINDS)
    """That the backend serves."""
    alike: tuple[str, ...] = ALIKE
    """Of these, what only the slow tests check."""
    placed = "int4-g128"
    """A kind of which a row's result is the same wherever it is."""
    padded: tuple[str, ...] = ("int4-g64", "fp8")
    sizes: tuple[tuple[int, int, int], ...] = ((1, 48, 320), (5, 41, 450), (33, 72, 129))
    """Tokens, outputs and inputs."""
    tokens: st.SearchStrategy[int] = st.integers(1, 70)
    outputs: st.SearchStrategy[int] = st.integers(1, 150)
    dtypes: tuple[jnp.dtype, ...] = (jnp.bfloat16, jnp.float16, jnp.float32)
    tolerance = 2e-6
    """Of sums in float32, relative to the largest."""

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        """Formats, groups, zero points and quantized activations, for sizes that fill no tile."""
        few = self.problems()

        # Each of the few is checked once below; more examples differ in their numbers only.
        @replace(picks, per_shape=2).settings(few)
        @given(problem=picks.shapes(few, self.any_problem()), seed=st.integers(1, 99))
        def check(problem: Problem, seed: int) -> None:
            self.check(problem, seed)

        for problem in () if picks.free else few:
            self.check(problem, seed=0)
        check()

    @pytest.mark.slow
    def test_parity_of_every_combination(self) -> None:
        for kind, size, dtype in product(self.kinds, self.sizes, self.dtypes):
            self.check(Problem(kind, *size, dtype, bias=True), seed=1)

    def problems(self) -> tuple[Problem, ...]:
        """One of each kind that differs much, with sizes and dtypes in turn, since each combination compiles."""
        return tuple(
            Problem(
                kind,
                *self.sizes[i % len(self.sizes)],
                self.dtypes[(i + i // 3) % len(self.dtypes)],
                bias=i % 2 == 0,
            )
            for i, kind in enumerate(kind for kind in self.kinds if kind not in self.alike)
        )

    def any_problem(self) -> st.SearchStrategy[Problem]:
        return st.builds(
            Problem,
            kind=st.sampled_from(self.kinds),
            T=self.tokens,
            O=self.outputs,
            I=st.integers(1, 700),
            dtype=st.sampled_from(self.dtypes),
            bias=st.booleans(),
        )

    def check(self, problem: Problem, seed: int) -> None:
        x_TI, w = draw(problem.kind, problem.T, problem.O, problem.I, problem.dtype, seed)
        bias_O = None
        if problem.bias:
            bias_O = jnp.asarray(np.random.default_rng(seed).normal(size=problem.O), problem.dtype)
        want, got = run(reference, x_TI, w, bias_O), run(self.op, x_TI, w, bias_O)
        # Single results may cancel; the terms of a sum do not.
        largest = max(1, np.abs(want).max())
        np.testing.assert_allclose(
            got, want, rtol=0, atol=self.tolerance * largest, err_msg=f"{problem}, seed {seed}"
        )

    def test_result_has_the_dtype_of_x(self) -> None:
        x_TI, w = draw(self.kinds[0], *self.sizes[0], jnp.bfloat16)
        got = jitted(self.op)(x_TI, w)
        assert got.dtype == jnp.bfloat16
        want = run(reference, x_TI, w)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("at", [0, 1])
    def test_rows_do_not_depend_on_neighbours(self, at: int) -> None:
        """A row's result is the same bits whatever the other rows hold, NaN included."""
        x_TI, w = draw(self.kinds[-at], *self.sizes[1], jnp.bfloat16)
        want = run(self.op, x_TI, w)
        for row in (0, len(want) - 1):
            others = jnp.full_like(x_TI, jnp.nan).at[row].set(x_TI[row])
            np.testing.assert_array_equal(run(self.op, others, w)[row], want[row])

    def test_rows_do_not_depend_on_their_place(self) -> None:
        x_TI, w = draw(self.placed, *self.sizes[1], jnp.bfloat16)
        np.testing.assert_array_equal(run(self.op, x_TI[::-1], w), run(self.op, x_TI, w)[::-1])

    @pytest.mark.parametrize("at", [0, 1])
    def test_padding_of_the_last_tile_reaches_nothing(self, at: int) -> None:
        """What a weight holds past its inputs is not used."""
        x_TI, w = draw(self.padded[-at], *self.sizes[0], jnp.bfloat16)
        assert self.sizes[0][2] % 128 == 64
        bits = np.array(w.values_JOP).view(np.uint8)
        if w.format == "int4":
            bits[-1] |= 0xF0
        else:
            bits[-1, :, 64:] = 0x7E  # 126, or 448 as float8_e4m3fn.
        dirty = replace(w, values_JOP=jnp.asarray(bits.view(w.values_JOP.dtype)))
        np.testing.assert_array_equal(run(self.op, x_TI, dirty), run(self.op, x_TI, w))

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        x_TI, w = draw(self.kinds[0], *self.sizes[0], jnp.bfloat16)
        with pytest.raises(ValueError, match="tiles of 128 inputs"):
            self.op(jnp.zeros((1, x_TI.shape[1] + 128), jnp.bfloat16), w)
