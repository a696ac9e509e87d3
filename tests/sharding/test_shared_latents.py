"""Latent attention and a shared expert on four devices: the tokens and log-probabilities of one device.

The heads and the shared expert are spread over all four; each device holds all latents.
"""

import jax
import pytest

from jaxinfer.engine.build import Engine
from sharding.mesh import make_layout
from tests.engine.test_invariance_tiny_lm import Seen
from tests.sharding.test_shared_model import BOUND, JOBS
from tests.support.engines import run
from tests.support.latent_model import latent_model
from tests.support.tiny_models import TinyModel, tiny_settings

pytestmark = pytest.mark.feature("DeepseekV3", "tensor parallel", "expert parallel", "logprobs")


@pytest.fixture(scope="module", params=[None, pytest.param(8, marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest) -> TinyModel:
    """Its parameter: the rows from which on the devices exchange them in sparse layers."""
    return latent_model(make_layout(jax.devices(), 2, 2, exchange_from=request.param))


def engine_of(model: TinyModel) -> Engine:
    return model.engine(tiny_settings(max_num_batched_tokens=8), one_bucket=True)


@pytest.mark.feature("chunked prefill", "prefix cache", "overlap", "sampling", "penalties")
def test_the_same_as_on_one_device(shared: TinyModel) -> None:
    expected = run(engine_of(latent_model()), JOBS)
    engine = engine_of(shared)
    for _ in range(2):
        again = run(engine, JOBS)
        for output, want in zip(again, expected, strict=True):
            Seen.of(output).assert_close(Seen.of(want), BOUND)
    assert all(output.num_cached_tokens > 0 for output in again)


def test_every_device_holds_the_latents(shared: TinyModel) -> None:
    for kv in shared.engine(tiny_settings(max_num_batched_tokens=8), one_bucket=True).core._runner.kv_cache:
        for pool, width in ((kv.k_NKSh, 24), (kv.v_NKSh, 8)):
            assert {shard.data.shape[1:] for shard in pool.addressable_shards} == {(1, 4, width)}
            assert len(pool.addressable_shards) == 4
