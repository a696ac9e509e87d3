"""How many blocks the engine takes."""

import jax.numpy as jnp
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
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


@pytest.mark.feature("context parallel")
def test_a_context_on_several_devices_has_as_many_times_the_blocks():
    """``cache.memory`` is that of one device, which holds its share of the slots of every block."""

    def fitted(slots: int) -> int:
        config = engines.config(num_blocks=None, block_size=16, max_num_seqs=64)
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"memory": 2**28})})
        plan = CompilePlan.make(config.scheduler, 32768, 16, 1)
        dtype = jnp.dtype(jnp.bfloat16)
        return fit_blocks(config, plan, SPECS, (None,), (0,), dtype, lambda: 0, slots=slots)[0]

    assert [fitted(slots) for slots in (16, 8, 4)] == [4096, 8192, 16384]
