"""A model whose layers are spread over stages: weights, caches and runner."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from jaxinfer.checkpoints.loader import Param
from jaxinfer.config import EngineConfig
from jaxinfer.engine.memory import fit_blocks, measure_temporaries
from jaxinfer.engine.model_setup import ModelSetup, Progress, kv_scales, read_weights
from jaxinfer.kv_cache.allocate import allocate, local_slots, local_specs
from jaxinfer.kv_cache.layout import LayerKVSpec
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.segments import SegmentedModel
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.pipeline_runner import PipelineRunner, Stage
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from pallas_kernels.linear.packed import PackedWeight
from sharding.layout import Layout


@dataclass(frozen=True)
class StageSetup:
    """A stage that is described, but not loaded.

    Attributes:
        first: its first layer.
        groups: KV group of each of its layers.
    """

    model: SegmentedModel
    layout: Layout
    first: int
    specs: tuple[LayerKVSpec, ...]
    groups: tuple[int, ...]
    params: dict[str, Param] = field(default_factory=dict)

    @property
    def paths(self) -> frozenset[str]:
        """Its parameters. A tied embedding belongs to the first stage and to the last."""
        inside = (path for segment in self.model.segments for path in segment.paths)
        return frozenset((*self.model.embed_paths, *inside, *self.model.head_paths))


def stage_setups(setup: ModelSetup) -> tuple[StageSetup, ...]:
    """The stages of a model, without weights."""
    return tuple(_stages(setup))


def _stages(setup: ModelSetup) -> Iterator[StageSetup]:
    specs, starts = kv_specs(setup.model), setup.stage_starts
    ends = (*starts[1:], setup.model.num_layers)
    for model, layout, start, end in zip(setup.stages, setup.layouts, starts, ends, strict=True):
        yield StageSetup(model, layout, start, specs[start:end], setup.groups[start:end])


def load_stages(setup: ModelSetup, stages: tuple[StageSetup, ...], progress: Progress | None = None) -> None:
    """Reads the parameters, one at a time, each into the stages that use it."""

    def place(path: str, weight: np.ndarray | PackedWeight) -> Param:
        assert isinstance(weight, np.ndarray)
        for stage in stages:
            if path in stage.paths:
                placed = stage.params[path] = stage.layout.place(weight, setup.parts.axes[path])
        return placed

    read_weights(setup, place, progress)


def size_stages(config: EngineConfig, setup: ModelSetup, stages: tuple[StageSetup, ...]) -> tuple[int, ...]:
    """Blocks of each KV group: as many as the stage with the least room has.

    Raises:
        ValueError: there is no room for one sequence of full length.
    """
    specs, layout = kv_specs(setup.model), setup.layout

    @cache
    def temporaries() -> int:  # the same for all stages: of all segments, on devices of the same shape
        functions = StepFunctions.make(setup.parts, setup.plan, setup.groups, layout)
        return measure_temporaries(setup.parts, functions, setup.plan, specs, setup.stored_dtype, layout)

    def blocks(stage: StageSetup) -> tuple[int, ...]:
        return fit_blocks(
            config,
            setup.plan,
            local_specs(stage.specs, stage.layout),
            setup.windows,
            stage.groups,
            setup.cache_dtype,
            temporaries,
            setup.num_devices,
            local_slots(config.cache.block_size, stage.layout),
        )

    return tuple(map(min, zip(*map(blocks, stages))))


def make_pipeline(
    config: EngineConfig,
    setup: ModelSetup,
    stages: tuple[StageSetup, ...],
    num_blocks: tuple[int, ...],
    sampler: DeviceSampler,
) -> PipelineRunner:
    """The runner of loaded stages."""
    scales = kv_scales(setup)
    block_size, dtype = config.cache.block_size, setup.stored_dtype
    made = []
    for stage in stages:
        functions = StepFunctions.make(stage.model, setup.plan, stage.groups, stage.layout)
        own = {layer - stage.first: scale for layer, scale in scales.items()}
        pools = allocate(stage.specs, stage.groups, num_blocks, block_size, dtype, own, stage.layout)
        made.append(Stage(ModelPrograms(stage.model, stage.params, functions), pools, stage.layout))
    return PipelineRunner(made, setup.plan, sampler, hidden_size=setup.model.hidden_size, dtype=setup.dtype)
