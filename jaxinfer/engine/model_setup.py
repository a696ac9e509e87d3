"""A model that is opened and described: shapes, dtypes, compile plan, and how large its cache is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.dtypes import resolve_dtype
from jaxinfer.checkpoints.kv_scales import LayerScales, read_kv_scales
from jaxinfer.checkpoints.loader import Param, Place, load_params
from jaxinfer.checkpoints.model_files import ModelFiles, open_model
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.checkpoints.stored_form import StoredForm, stored_forms
from jaxinfer.checkpoints.weight_map import WeightMap
from jaxinfer.config import EngineConfig, ParallelConfig
from jaxinfer.engine.activations import check_rounding, with_rounded_activations
from jaxinfer.engine.memory import fit_blocks, measure_temporaries
from jaxinfer.kv_cache.allocate import CACHE_DTYPES, allocate, local_slots, local_specs
from jaxinfer.kv_cache.layout import KVCache, LayerKVSpec, group_layers
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import family, parse_config
from jaxinfer.models.segments import SegmentedModel, Struct, segmented_model, split_stages
from jaxinfer.runner.programs import StepFunctions
from pallas_kernels.gpus import Generation, generation_of
from pallas_kernels.kv_storage import storage_dtype
from pallas_kernels.linear.packed import PackedWeight
from pallas_kernels.ops import Ops
from pallas_kernels.precision import compute_dtype
from pallas_kernels.select import select_ops
from sharding.layout import Layout
from sharding.mesh import make_layouts
from sharding.processes import shared_devices

Progress = Callable[[str, int, int], None]
"""(what, done, total): called during long parts of the start."""


CutsOf = Callable[[TransformerConfig], tuple[int, ...]]


@dataclass(frozen=True)
class MoreLayers:
    """Layers of a drafter, whose K and V lie in the blocks of the target.

    Attributes:
        groups: KV group of each of them, in the target's count.
    """

    specs: tuple[LayerKVSpec, ...] = ()
    groups: tuple[int, ...] = ()


NO_LAYERS = MoreLayers()


@dataclass(frozen=True)
class ModelSetup:
    """A model that is opened and described, but not loaded.

    Attributes:
        shapes: of every parameter as a whole; ``parts`` has those of one device's shares.
        forms: parameters that are held in the form in which the checkpoint stores them.
        dtype: of activations and all other parameters; ``cache_dtype`` of K and V, held as ``stored_dtype``.
        windows, groups: sliding window of each KV group, and the group of each layer.
        layouts: the devices of each stage of the pipeline, one stage if there is none.
        stage_starts: first layer of each stage.
    """

    files: ModelFiles
    model: TransformerConfig
    ops: Ops
    parts: SegmentedModel
    shapes: dict[str, Struct]
    forms: dict[str, StoredForm]
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    stored_dtype: jnp.dtype
    max_model_len: int
    windows: tuple[int | None, ...]
    groups: tuple[int, ...]
    plan: CompilePlan
    layouts: tuple[Layout, ...]
    stage_starts: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """The devices of the last stage, which samples."""
        return self.layouts[-1]

    @property
    def num_devices(self) -> int:
        return sum(layout.num_devices for layout in self.layouts)

    @property
    def stages(self) -> tuple[SegmentedModel, ...]:
        return split_stages(self.parts, self.stage_starts)


def set_up_model(
    config: EngineConfig, longest: int | None = None, cuts_of: CutsOf | None = None
) -> ModelSetup:
    """Opens the checkpoint and derives shapes; reads headers only.

    Args:
        longest: sequences are not longer, where the configuration does not say how long they are.
        cuts_of: layers at which a segment is to start.

    Raises:
        CheckpointError: the model cannot be found or read.
        ValueError: the model asks for something unknown, ``max_model_len`` exceeds what it supports, or there are too
            few devices, or they cannot share it.
    """
    parallel = config.parallel
    pulls = config.disaggregation.decodes and config.disaggregation.transport == "jax"
    devices = shared_devices(parallel.num_devices)
    layouts = make_layouts(
        devices,
        parallel.tensor,
        parallel.expert,
        parallel.pipeline,
        parallel.context,
        committed=pulls,
        exchange_from=parallel.exchange_rows,
    )
    files = open_model(resolve_reference(config.model.reference, config.model.sha256))
    model = parse_config(files.config)
    if parallel.exchange_rows is not None and model.moe is None:
        raise ValueError("parallel.exchange_rows is set, but the model has no experts to exchange tokens for")
    max_model_len = config.model.max_model_len or min(model.max_position, longest or model.max_position)
    if max_model_len > model.max_position:
        raise ValueError(
            f"model.max_model_len is {max_model_len}, but the model supports {model.max_position} tokens"
        )
    ops = select_ops(
        config.kernel.backend,
        jax.default_backend(),
        config.kernel.strict,
        _gpu_generation(jax.local_devices()[0]),
        shared_slots=parallel.context > 1,
    )
    stored = parallel.num_devices == 1 and _keep_stored(config, ops)
    if config.model.activations != "float":
        ops = with_rounded_activations(ops, stored, config.model.activations)
    declared, _ = resolve_dtype(config.model.dtype, files.config, files.source)
    # Kernels that read weights as stored take activations in float32 and multiply in it.
    dtype = jnp.dtype(jnp.float32) if stored else compute_dtype(declared, jax.default_backend())
    own = declared if stored else dtype  # the same kernels read K and V of 16 bits as fast as they come
    cache_dtype = jnp.dtype(own if config.cache.dtype == "auto" else CACHE_DTYPES[config.cache.dtype])
    starts = stage_starts(parallel, model.num_layers)
    build = partial(
        segmented_model,
        model,
        dtype=dtype,
        param_dtype=dtype,
        max_model_len=max_model_len,
        layers_per_segment=config.compile.layers_per_segment,
        cuts=(*starts, *(() if cuts_of is None else cuts_of(model))),
    )
    whole = parts = build(ops)
    if layouts[0].num_devices > 1:
        ops = replace(ops, shards=layouts[0].rules)
        parts = build(ops)
    forms: dict[str, StoredForm] = {}
    if stored:
        names = _weight_map(files, model)
        forms = stored_forms(parts.shapes, parts.packable, names, files.source, declared, ops.packed_formats)
    check_rounding(config.model.activations, forms)
    structs = {path: form.struct() for path, form in forms.items()}
    windows, groups = group_layers(kv_specs(model))
    return ModelSetup(
        files=files,
        model=model,
        ops=ops,
        parts=replace(parts, shapes={**parts.shapes, **structs}),
        shapes={**whole.shapes, **structs},
        forms=forms,
        dtype=dtype,
        cache_dtype=cache_dtype,
        stored_dtype=storage_dtype(cache_dtype, ops.platform),
        max_model_len=max_model_len,
        windows=windows,
        groups=groups,
        plan=CompilePlan.make(
            config.scheduler,
            max_model_len,
            config.cache.block_size,
            len(windows),
            min_tokens=1 if dtype == jnp.float32 else 2,
            draft_limits=config.speculative.draft_limits,
            tree_nodes=config.speculative.tree_nodes,
        ),
        layouts=layouts,
        stage_starts=starts,
    )


def stage_starts(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """First layer of each stage of a pipeline.

    Raises:
        ValueError: the stages that are asked for are not the layers of the model.
    """
    counts = parallel.stage_layers
    if counts is None:
        least, more = divmod(num_layers, parallel.pipeline)
        if least == 0:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but the model has {num_layers} layers only"
            )
        counts = tuple(least + (stage < more) for stage in range(parallel.pipeline))
    if sum(counts) != num_layers:
        raise ValueError(
            f"parallel.stage_layers {list(counts)} have {sum(counts)} layers, but the model has {num_layers}"
        )
    return tuple(sum(counts[:stage]) for stage in range(len(counts)))


def _keep_stored(config: EngineConfig, ops: Ops) -> bool:
    """Whether weights are held as the checkpoint stores them."""
    if config.model.weights == "stored" and not ops.packed_formats:
        raise ValueError(
            "model.weights is 'stored', but the kernels that were chosen read arrays only; allowed are auto and float"
        )
    return config.model.weights != "float" and bool(ops.packed_formats)


def _weight_map(files: ModelFiles, model: TransformerConfig) -> WeightMap:
    return files.weight_map(family(model.architecture).weight_map(model))


def load_weights(setup: ModelSetup, progress: Progress | None = None) -> dict[str, Param]:
    """Reads the parameters onto the devices, one at a time, each share straight onto its own."""
    assert len(setup.layouts) == 1, "load_stages reads those of a pipeline"

    def place(path: str, weight: np.ndarray | PackedWeight) -> Param:
        if isinstance(weight, PackedWeight):
            return jax.device_put(weight)
        return setup.layout.place(weight, setup.parts.axes[path])

    return read_weights(setup, place, progress)


def read_weights(setup: ModelSetup, place: Place, progress: Progress | None) -> dict[str, Param]:
    """Reads the parameters, one at a time.

    Args:
        place: see ``load_params``.
    """

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("loading weights", done, total)

    names = _weight_map(setup.files, setup.model)
    unused = family(setup.model.architecture).unused(setup.model)
    return load_params(setup.shapes, names, setup.files.source, place, report, setup.forms, unused)


def allocate_cache(config: EngineConfig, setup: ModelSetup, num_blocks: tuple[int, ...]) -> KVCache:
    """Zeroed pools of a model's layers.

    Args:
        num_blocks: of each KV group.
    """
    specs, scales = kv_specs(setup.model), kv_scales(setup)
    block_size, dtype = config.cache.block_size, setup.stored_dtype
    return allocate(specs, setup.groups, num_blocks, block_size, dtype, scales, setup.layout)


def size_cache(config: EngineConfig, setup: ModelSetup, more: MoreLayers = NO_LAYERS) -> tuple[int, ...]:
    """Blocks of each KV group; measured on the device unless the configuration says how many.

    Raises:
        ValueError: there is no room for one sequence of full length.
    """
    specs, layout = kv_specs(setup.model), setup.layout

    def temporaries() -> int:
        functions = StepFunctions.make(setup.parts, setup.plan, setup.groups, layout)
        return measure_temporaries(setup.parts, functions, setup.plan, specs, setup.stored_dtype, layout)

    return fit_blocks(
        config,
        setup.plan,
        local_specs(specs + more.specs, layout),
        setup.windows,
        setup.groups + more.groups,
        setup.cache_dtype,
        temporaries,
        layout.num_devices,
        local_slots(config.cache.block_size, layout),
    )


def kv_scales(setup: ModelSetup) -> LayerScales:
    """The checkpoint's scales, for a cache that is quantized."""
    if setup.cache_dtype.itemsize > 1:
        return {}
    num_heads = kv_specs(setup.model)[0].num_kv_heads
    return read_kv_scales(setup.files.source, setup.model.num_layers, num_heads)


def _gpu_generation(device: jax.Device) -> Generation | None:
    """The generation of an NVIDIA GPU; None for any other device."""
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return None
    return generation_of(device.compute_capability)
