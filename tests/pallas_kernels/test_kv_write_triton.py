"""The KV write in Pallas-Triton: the contract in interpret mode, and what only this backend promises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_write import cases, reference, triton, tuning
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.kv_write_cases import KVWriteContract


class TestKVWriteTriton(KVWriteContract):
    op = staticmethod(functools.partial(triton.kv_write, interpret=True))
    typed_pools_only = True


def _arguments(
    T: int, K: int, widths: tuple[int, int], dtype: jnp.dtype, N: int = 9, S: int = 4
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    rng = np.random.default_rng(T * K)
    pools = [jnp.asarray(rng.integers(-9, 9, (N, K, S, h)), jnp.float32).astype(dtype) for h in widths]
    x = [jnp.asarray(rng.normal(size=(T, K, h)) * 20, jnp.bfloat16) for h in widths]
    slot_T = jnp.asarray(S + rng.permutation((N - 1) * S)[:T], jnp.int32)
    scales = {name: jnp.asarray(rng.uniform(0.01, 1, K), jnp.float32) for name in ("k_scale_K", "v_scale_K")}
    return [*pools, *x, slot_T], scales


@pytest.mark.parametrize(
    ("T", "K", "widths", "choice", "dtype"),
    [
        (13, 3, (80, 80), tuning.Choice(rows=8, num_warps=1), jnp.bfloat16),
        (5, 1, (96, 16), tuning.Choice(rows=1, num_warps=1), jnp.int8),
        (9, 2, (24, 64), tuning.Choice(rows=32, num_warps=2), jnp.float8_e4m3fn),
        (1, 8, (16, 16), None, jnp.bfloat16),
    ],
)
def test_widths_heads_and_tiles(
    T: int, K: int, widths: tuple[int, int], choice: tuning.Choice | None, dtype: jnp.dtype
) -> None:
    """Widths that are no powers of two and differ between the pools (a latent and its rope key), heads and tokens that
    do not fill the tiles: the same bits everywhere as from the reference."""
    args, scales = _arguments(T, K, widths, dtype)
    got = jitted(functools.partial(triton.kv_write, choice=choice, interpret=True))(*args, **scales)
    want = jitted(reference.kv_write)(*args, **scales)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_rounds_half_to_even_and_saturates() -> None:
    values = jnp.asarray(
        [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -300.0, -128.5, 3.49, -3.51, 0, 1, 2, 3]
    )
    pool, x_TKh = jnp.zeros((2, 1, 1, 16), jnp.int8), values.reshape(1, 1, 16)
    ones = {"k_scale_K": jnp.ones(1), "v_scale_K": jnp.ones(1)}
    got, _ = triton.kv_write(pool, pool, x_TKh, x_TKh, jnp.asarray([1], jnp.int32), **ones, interpret=True)
    want = np.clip(np.round(np.asarray(values)), -128, 127)
    np.testing.assert_array_equal(np.asarray(got)[1].ravel(), want)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16])
def test_nan_stays_nan(dtype: jnp.dtype) -> None:
    """A value that is NaN is stored as NaN, not as the largest number: the engine must see that it went wrong."""
    pool, x_TKh = jnp.zeros((2, 1, 1, 16), dtype), jnp.full((1, 1, 16), jnp.nan)
    ones = {"k_scale_K": jnp.ones(1), "v_scale_K": jnp.ones(1)}
    got, _ = triton.kv_write(pool, pool, x_TKh, x_TKh, jnp.asarray([1], jnp.int32), **ones, interpret=True)
    assert np.isnan(np.asarray(got[1].astype(jnp.float32))).all()


@pytest.mark.parametrize(
    ("dtype", "blocks", "generation", "word"),
    [
        (jnp.uint16, 4, "hopper", "typed pools"),
        (jnp.int32, 4, "hopper", "int32"),
        (jnp.float8_e4m3fn, 4, "ampere", "Ampere"),
        (jnp.int8, 3 << 14, "hopper", "32-bit"),
        (jnp.int8, 5 << 14, "hopper", ""),
        (jnp.float8_e5m2, 4, "ampere", ""),
        (jnp.bfloat16, 3 << 14, "hopper", ""),
    ],
)
def test_supports(dtype: jnp.dtype, blocks: int, generation: Generation, word: str) -> None:
    """Refusals name their reason; pools between 2 and 4 GiB of 1-byte values are refused."""
    pool = jax.ShapeDtypeStruct((blocks, 8, 64, 128), dtype)
    x = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    slot, one = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    ok, reason = triton.supports(pool, pool, x, x, slot, k_scale_K=one, v_scale_K=one, generation=generation)
    assert ok == (word == "")
    assert word in reason


def test_donated_pools_are_updated_in_place() -> None:
    """The call that is lowered for GPUs aliases both pools."""
    args, scales = _arguments(7, 2, (64, 64), jnp.bfloat16)
    lowered = jax.jit(
        lambda *a: triton.kv_write(*a[:5], k_scale_K=a[5], v_scale_K=a[6]), donate_argnums=(0, 1)
    ).trace(*args, *scales.values())
    call = next(e for e in lowered.jaxpr.eqns if e.primitive.name == "pallas_call")
    assert call.params["input_output_aliases"] == ((0, 0), (1, 1))


def test_tuning_choices_fit_their_shapes() -> None:
    for case in cases.kernel_cases():
        for choice in case.candidates:
            assert choice.num_warps in (1, 2, 4, 8)
            assert math.log2(choice.rows).is_integer()
    assert len({case.name for case in cases.kernel_cases()}) == len(cases.SHAPES)
