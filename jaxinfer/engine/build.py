"""From a configuration to a running engine."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.dtypes import resolve_dtype
from jaxinfer.checkpoints.generation_defaults import sampling_defaults
from jaxinfer.checkpoints.kv_scales import LayerScales, read_kv_scales
from jaxinfer.checkpoints.loader import load_params
from jaxinfer.checkpoints.model_files import ModelFiles, open_model
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.inputs import InputProcessor, Limits
from jaxinfer.engine.memory import fit_blocks, measure_temporaries
from jaxinfer.engine.stop import StopConditions
from jaxinfer.kv_cache.allocate import CACHE_DTYPES, allocate
from jaxinfer.kv_cache.layout import KVCache, group_layers
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import family, parse_config
from jaxinfer.models.segments import SegmentedModel, segmented_model
from jaxinfer.observability.compilation import CompilationMonitor, use_compilation_cache
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.host_memory import keep_freed_memory
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.runner.protocol import Runner
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.speculative.build import find_drafter, make_speculation
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.loading import load_text
from jaxinfer.tokenization.tokenizer import Tokenizer
from pallas_kernels.gpus import Generation, generation_of
from pallas_kernels.kv_storage import storage_dtype
from pallas_kernels.ops import Ops
from pallas_kernels.precision import compute_dtype
from pallas_kernels.select import select_ops

logger = logging.getLogger(__name__)

NO_TOKENIZER = "none"
"""``model.tokenizer`` of a model that is used by token ids only."""

Progress = Callable[[str, int, int], None]
"""(what, done, total): called during long parts of the start."""


@dataclass(frozen=True)
class Engine:
    """A ready engine and what its front ends need to know of the model.

    Attributes:
        core: the step loop.
        inputs: makes validated sequences for it.
        compilations: counts programs compiled since warm-up.
        grammars: compiles the forms of answers; None without a tokenizer.
        sampling_defaults: fields of ``SamplingParams`` that the model's ``generation_config.json`` recommends, for
            front ends whose users expect them.
        text_path: where tokenizer and chat template came from; None without a tokenizer.
    """

    config: EngineConfig
    core: EngineCore
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate
    plan: CompilePlan
    limits: Limits
    runner: Runner
    compilations: CompilationMonitor
    grammars: GrammarCompiler | None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    text_path: Path | None = None


@dataclass(frozen=True)
class ModelSetup:
    """A model that is opened and described, but not loaded.

    Attributes:
        dtype: of weights and activations; ``cache_dtype`` of K and V, held as ``stored_dtype``.
        windows, groups: sliding window of each KV group, and the group of each layer.
    """

    files: ModelFiles
    model: TransformerConfig
    ops: Ops
    parts: SegmentedModel
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    stored_dtype: jnp.dtype
    max_model_len: int
    windows: tuple[int | None, ...]
    groups: tuple[int, ...]
    plan: CompilePlan


def set_up_model(config: EngineConfig) -> ModelSetup:
    """Opens the checkpoint and derives shapes; reads headers only.

    Raises:
        CheckpointError: the model cannot be found or read.
        ValueError: the model asks for something unknown, or ``max_model_len`` exceeds what it supports.
    """
    files = open_model(resolve_reference(config.model.reference, config.model.sha256))
    model = parse_config(files.config)
    max_model_len = config.model.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ValueError(
            f"model.max_model_len is {max_model_len}, but the model supports {model.max_position} tokens"
        )
    declared, _ = resolve_dtype(config.model.dtype, files.config, files.source)
    dtype = compute_dtype(declared, jax.default_backend())
    cache_dtype = dtype if config.cache.dtype == "auto" else jnp.dtype(CACHE_DTYPES[config.cache.dtype])
    ops = select_ops(
        config.kernel.backend, jax.default_backend(), config.kernel.strict, _gpu_generation(jax.devices()[0])
    )
    windows, groups = group_layers(kv_specs(model))
    return ModelSetup(
        files=files,
        model=model,
        ops=ops,
        parts=segmented_model(
            model,
            ops,
            dtype,
            param_dtype=dtype,
            max_model_len=max_model_len,
            layers_per_segment=config.compile.layers_per_segment,
        ),
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
        ),
    )


def load_weights(setup: ModelSetup, progress: Progress | None = None) -> dict[str, jax.Array]:
    """Reads the parameters onto the device, one tensor at a time."""
    weight_map = setup.files.weight_map(family(setup.model.architecture).weight_map(setup.model))

    def place(_: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array)

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("loading weights", done, total)

    return load_params(setup.parts.shapes, weight_map, setup.files.source, place, report)


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Loads the model, sizes and allocates the KV cache, and warms the programs up.

    Raises:
        CheckpointError, TokenizerError, ValueError: what is wrong with model or configuration.
    """
    find_drafter(config.speculative.drafter)  # a wrong name is told before the model is read
    use_compilation_cache(config.compile.cache_dir)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    setup = set_up_model(config)
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        # Weights and programs do not depend on each other: one is read while the other is compiled.
        reading = reader.submit(load_weights, setup, progress)
        text_path = _text_path(config, setup.files)
        tokenizer, chat_template = load_text(text_path)
        eos_token_ids = _eos_ids(setup.model, tokenizer)
        sampler = DeviceSampler(setup.model.vocab_size, setup.plan, eos_token_ids, setup.ops.truncated_draw)
        functions = _compile_first(setup, sampler)
        cache = None
        if (config.cache.num_blocks or config.cache.memory) is not None:
            cache = _allocate_cache(config, setup)
        params = reading.result()
    # A cache that takes what is left has to wait for the weights.
    num_blocks, kv_cache = cache or _allocate_cache(config, setup)
    runner = JaxRunner(
        ModelPrograms(setup.parts, params, functions),
        kv_cache,
        setup.plan,
        sampler,
        hidden_size=setup.model.hidden_size,
        dtype=setup.dtype,
    )
    return assemble(
        config,
        runner,
        setup.plan,
        num_blocks,
        setup.windows,
        tokenizer=tokenizer,
        chat_template=chat_template,
        vocab_size=setup.model.vocab_size,
        max_model_len=setup.max_model_len,
        eos_token_ids=eos_token_ids,
        progress=progress,
        sampling_defaults=sampling_defaults(setup.files.generation_config),
        text_path=text_path,
    )


def assemble(
    config: EngineConfig,
    runner: Runner,
    plan: CompilePlan,
    num_blocks: tuple[int, ...],
    windows: tuple[int | None, ...],
    *,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    progress: Progress | None = None,
    sampling_defaults: Mapping[str, float] | None = None,
    text_path: Path | None = None,
) -> Engine:
    """Puts scheduler, block pool, builder and core around a runner; tests call it with theirs."""
    kv = KVCacheManager(num_blocks, config.cache.block_size, windows, config.cache.prefix_caching)
    builder = BatchBuilder(plan)
    compilations = CompilationMonitor(config.compile.on_recompile)
    if isinstance(runner, JaxRunner) and config.compile.warm_up == "full":
        runner.warm_up(
            builder, None if progress is None else lambda done, total: progress("compiling", done, total)
        )
        compilations.arm()
    chunk = config.scheduler.chunk_size or config.scheduler.max_num_batched_tokens
    limits = Limits(
        vocab_size, max_model_len, kv.max_tokens(chunk), num_blocks[0] - 1, config.cache.block_size
    )
    core = EngineCore(
        Scheduler(config.scheduler, kv),
        builder,
        runner,
        StopConditions(eos_token_ids),
        tokenizer,
        compilations,
        depth=config.scheduler.overlap,
        speculation=make_speculation(config.speculative),
    )
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids, config.structured)
    inputs = InputProcessor(
        tokenizer, limits, len(windows), eos_token_ids, grammars, config.structured.jump_ahead
    )
    return Engine(
        config,
        core,
        inputs,
        tokenizer,
        chat_template,
        plan,
        limits,
        runner,
        compilations,
        grammars,
        sampling_defaults or {},
        text_path,
    )


def _compile_first(setup: ModelSetup, sampler: DeviceSampler) -> StepFunctions:
    """The model's functions; what every request needs and no weights is compiled."""
    functions = StepFunctions.make(setup.parts, setup.plan, setup.groups)
    hidden_XD = jax.ShapeDtypeStruct((setup.plan.token_buckets[-1], setup.model.hidden_size), setup.dtype)
    functions.compile_head(setup.parts, hidden_XD, setup.plan.row_buckets[0])
    sampler.compile_one_row()
    return functions


def _allocate_cache(config: EngineConfig, setup: ModelSetup) -> tuple[tuple[int, ...], KVCache]:
    """Blocks of each KV group, and the zeroed pools."""
    num_blocks = size_cache(config, setup)
    stored = setup.stored_dtype
    specs, scales = kv_specs(setup.model), _kv_scales(setup)
    return num_blocks, allocate(specs, setup.groups, num_blocks, config.cache.block_size, stored, scales)


def size_cache(config: EngineConfig, setup: ModelSetup) -> tuple[int, ...]:
    """Blocks of each KV group; measured on the device unless the configuration says how many.

    Raises:
        ValueError: there is no room for one sequence of full length.
    """
    specs = kv_specs(setup.model)

    def temporaries() -> int:
        return measure_temporaries(setup.parts, setup.plan, specs, setup.groups, setup.stored_dtype)

    return fit_blocks(config, setup.plan, specs, setup.windows, setup.groups, setup.cache_dtype, temporaries)


def _kv_scales(setup: ModelSetup) -> LayerScales:
    """The checkpoint's scales, for a cache that is quantized."""
    if setup.cache_dtype.itemsize > 1:
        return {}
    return read_kv_scales(setup.files.source, setup.model.num_layers, setup.model.num_kv_heads)


def _text_path(config: EngineConfig, files: ModelFiles) -> Path | None:
    """Where the tokenizer is; None if the configuration says "none"."""
    if config.model.tokenizer == NO_TOKENIZER:
        return None
    named = config.model.tokenizer
    return files.tokenizer_path if named is None else resolve_reference(named)


def _gpu_generation(device: jax.Device) -> Generation | None:
    """The generation of an NVIDIA GPU; None for any other device."""
    if device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return None
    return generation_of(device.compute_capability)


def _eos_ids(model: TransformerConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's own end tokens, and the tokenizer's if the model names none."""
    return model.eos_token_ids or (() if tokenizer is None else tokenizer.eos_token_ids)
