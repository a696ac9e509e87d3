"""The sizes of pools that 32-bit offsets address."""

import jax.numpy as jnp
import pytest

from pallas_kernels.pool_limits import offsets_fit

GIB = 1 << 30


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(
    ("size", "fits"),
    [(GIB, True), (2 * GIB, True), (2 * GIB + 1, False), (4 * GIB, False), (4 * GIB + 1, True)],
)
def test_one_byte_pools_between_2_and_4_gib_are_refused(dtype, size, fits):
    ok, reason = offsets_fit((size,), dtype)
    assert ok == fits
    assert fits or "at most 2 GiB, or more than 4 GiB" in reason


def test_wider_types_fit_at_any_size():
    assert offsets_fit((2 * GIB,), jnp.bfloat16) == (True, "")
    assert offsets_fit((2 * GIB + 1,), jnp.bfloat16) == (True, "")
    assert offsets_fit((8 * GIB,), jnp.float32) == (True, "")
