"""The engine of a replica in tests: a simulated model whose tokens follow from their position alone, so that a request
that goes on elsewhere must give what it would have given."""

from functools import partial

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.model_setup import Progress
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from serve.run import EngineSource
from tests.support import engines

MAX_MODEL_LEN = 512


class PositionRunner(SimulatedRunner):
    def begin(self, plan, arrays):
        begun = super().begin(plan, arrays)
        begun.tokens[:] = 3 + (np.asarray(arrays.samples.positions) * 7919) % 200
        return begun


def build(config: EngineConfig, progress: Progress, seconds: float = 0.0) -> Engine:
    return engines.build(
        lambda _: PositionRunner(engines.VOCAB, CostModel(base=seconds)), config, max_model_len=MAX_MODEL_LEN
    )


def source(seconds: float) -> EngineSource:
    """With steps of so many seconds, on a thread of the replica."""
    return EngineSource(("false",), partial(build, seconds=seconds))


def overrides(name: str, seqs: int = 4, num_blocks: int = 512, **values: object) -> dict[str, object]:
    """Of the engine's configuration."""
    return {
        "server.engine": "thread",
        "server.served_model_names": [name],
        "cache.block_size": 4,
        "cache.num_blocks": num_blocks,
        "scheduler.max_num_seqs": seqs,
        "scheduler.max_num_batched_tokens": 64,
        "compile.cache_dir": "none",
        **values,
    }
