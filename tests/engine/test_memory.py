"""How many blocks the engine takes."""

import jax.numpy as jnp
import pytest

from jaxinfer.engine.memory import fit_blocks
from jaxinfer.kv_cache.layout import LayerKVSpec
from tests.support import engines

SPECS = (LayerKVSpec(8, 128, None),)


def fit(num_blocks: int, dtype: jnp.dtype) -> tuple[int, ...]:
    config = engines.config(num_blocks=num_blocks, block_size=16)
    return fit_blocks(config, None, SPECS, (None,), (0,), jnp.dtype(dtype), lambda: 0)


def test_an_explicit_number_of_blocks_is_taken():
    assert fit(200_000, jnp.bfloat16) == (200_000,)
    assert fit(100_000, jnp.int8) == (100_000,)


def test_a_number_of_blocks_that_kernels_cannot_address_is_refused_with_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"num_blocks is 200000.*int8.*at most 131072 blocks, or more than 262144"
    ):
        fit(200_000, jnp.int8)
