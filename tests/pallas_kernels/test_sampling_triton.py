"""The truncated draw in Pallas-Triton, interpreted: the contract, and what the backend refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sampling import triton, tuning
from pallas_kernels.sampling.cases import kernel_cases
from tests.pallas_kernels.sampling_cases import TruncatedDrawContract

# Tiles and chunks of a few groups: rows of 1100 tokens (9 groups) need several of each.
SMALL = tuning.Choice(groups=4, stats_warps=1, chunk=4, row_warps=4)


class TestTruncatedDrawTriton(TruncatedDrawContract):
    op = staticmethod(partial(triton.truncated_draw, choice=SMALL, interpret=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((2, 1000), jnp.int32, "int32"),
        ((2, 1 << 20), jnp.float32, "vocabulary"),
        ((2, 1000), jnp.float64, "float64"),
    ],
)
def test_refusals(shape: tuple[int, int], dtype: jnp.dtype, word: str) -> None:
    row = jax.ShapeDtypeStruct((2,), jnp.float32)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        ok, reason = triton.supports(jax.ShapeDtypeStruct(shape, dtype), *[row] * 5)
    assert not ok
    assert word in reason


def test_cases_are_supported() -> None:
    for case in kernel_cases():
        ok, reason = triton.supports(*jax.eval_shape(case.inputs, jax.random.key(0)))
        assert ok, (case.name, reason)


def test_a_small_batch_is_cut_into_smaller_tiles() -> None:
    assert tuning.choose("hopper", 1, 128256).groups < tuning.choose("hopper", 64, 128256).groups
