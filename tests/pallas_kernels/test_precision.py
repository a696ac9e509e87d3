"""The dtype that a processor computes in."""

import jax.numpy as jnp
import pytest

from pallas_kernels.precision import compute_dtype

NONE, AMX = frozenset({"avx2"}), frozenset({"avx2", "amx_bf16"})


@pytest.mark.parametrize(
    ("asked", "platform", "flags", "expected"),
    [
        (jnp.float32, "cpu", NONE, jnp.float32),
        (jnp.bfloat16, "cpu", NONE, jnp.float32),
        (jnp.bfloat16, "cpu", AMX, jnp.bfloat16),
        (jnp.float16, "cpu", AMX, jnp.float32),
        (jnp.bfloat16, "gpu", NONE, jnp.bfloat16),
        (jnp.float16, "gpu", NONE, jnp.float16),
    ],
)
def test_16_bit_models_are_computed_in_float32_where_there_are_no_16_bit_products(
    asked, platform, flags, expected
):
    assert compute_dtype(jnp.dtype(asked), platform, flags) == expected
