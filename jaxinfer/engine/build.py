"""From a configuration to a running engine."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import jax

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.generation_defaults import sampling_defaults
from jaxinfer.checkpoints.model_files import ModelFiles
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.draft_setup import Surroundings, cuts_of, set_up_drafter
from jaxinfer.engine.inputs import InputProcessor, Limits
from jaxinfer.engine.model_setup import (
    NO_LAYERS,
    ModelSetup,
    Progress,
    allocate_cache,
    load_weights,
    set_up_model,
    size_cache,
)
from jaxinfer.engine.pipeline_setup import load_stages, make_pipeline, size_stages, stage_setups
from jaxinfer.engine.remote_kv import BlockWriter
from jaxinfer.engine.remote_setup import add_remote, block_transfers, make_connector
from jaxinfer.engine.stop import StopConditions
from jaxinfer.hosts.gang import ALONE, Gang, join
from jaxinfer.hosts.identity import model_facts
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.models.config import TransformerConfig
from jaxinfer.observability.compilation import CompilationMonitor, use_compilation_cache
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.host_memory import keep_freed_memory
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.pipeline_runner import PipelineRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.runner.protocol import Runner
from jaxinfer.runner.timing import ProgramSeconds
from jaxinfer.scheduler.fetching import FetchPolicy
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.speculative.build import find_drafter, make_speculation, typical_of
from jaxinfer.speculative.drafter import DeviceDrafter
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.loading import load_text
from jaxinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NO_TOKENIZER = "none"
"""``model.tokenizer`` of a model that is used by token ids only."""


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
        gang: the processes that compute it.
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
    gang: Gang = ALONE


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Loads the model, sizes and allocates the KV cache, and warms the programs up.

    One of several processes waits for the others and keeps step with them; if it fails, they end too.

    Raises:
        CheckpointError, TokenizerError, ValueError: what is wrong with model or configuration.
    """
    find_drafter(config.speculative.drafter)  # a wrong name is told before the model is read
    use_compilation_cache(config.compile.cache_dir)
    gang = join(config)
    try:
        return _build(config, gang, progress)
    except Exception as error:
        gang.part(f"{type(error).__name__}: {error}")
        raise


def _build(config: EngineConfig, gang: Gang, progress: Progress | None) -> Engine:
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    setup = set_up_model(config, cuts_of=cuts_of(config))
    if gang is not ALONE:
        dtypes = f"{setup.dtype}, {setup.stored_dtype}"
        gang.agree("model", model_facts(setup.model, setup.files.source, setup.plan, dtypes))
    connector = make_connector(config, setup)  # what it lacks is told before weights are read
    try:
        engine = _load_and_assemble(config, setup, gang, progress, connector)
    except BaseException:
        if connector is not None:
            connector.close()
        raise
    if engine.core.remote is not None:
        engine.core.remote.connect()
    return engine


def _load_and_assemble(
    config: EngineConfig,
    setup: ModelSetup,
    gang: Gang,
    progress: Progress | None,
    connector: KVConnector | None,
) -> Engine:
    text_path = _text_path(config, setup.files)
    load = _load if len(setup.layouts) == 1 else _load_pipeline
    with ThreadPoolExecutor(1, thread_name_prefix="text") as reader:
        reading = reader.submit(load_text, text_path)
        loaded = load(config, setup, lambda: reading.result()[0], gang, progress)
    tokenizer, chat_template = reading.result()
    return assemble(
        config,
        loaded.runner,
        setup.plan,
        loaded.num_blocks,
        setup.windows,
        builder=loaded.builder,
        drafter=loaded.drafter,
        tokenizer=tokenizer,
        chat_template=chat_template,
        vocab_size=setup.model.vocab_size,
        max_model_len=setup.max_model_len,
        eos_token_ids=_eos_ids(setup.model, tokenizer),
        progress=progress,
        sampling_defaults=sampling_defaults(setup.files.generation_config),
        text_path=text_path,
        gang=gang,
        connector=connector,
    )


@dataclass(frozen=True)
class _Loaded:
    """A runner with weights and cache.

    Attributes:
        builder, drafter: see ``assemble``.
    """

    runner: Runner
    num_blocks: tuple[int, ...]
    builder: BatchBuilder
    drafter: DeviceDrafter | None = None


def _load(
    config: EngineConfig,
    setup: ModelSetup,
    text: Callable[[], Tokenizer | None],
    gang: Gang,
    progress: Progress | None,
) -> _Loaded:
    """A model whose layers are all on the same devices.

    Args:
        text: waits for the tokenizer, which is read meanwhile.
    """
    draft = set_up_drafter(config, setup)
    more = NO_LAYERS if draft is None else draft.layers
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        # Weights and programs do not depend on each other: one is read while the other is compiled.
        reading = reader.submit(load_weights, setup, progress)
        reading_draft = None if draft is None else reader.submit(draft.load, progress)
        tokenizer = text()
        if draft is not None:
            draft.check(tokenizer)
        sampler = _sampler(config, setup, tokenizer)
        functions = _compile_first(setup, sampler)
        num_blocks: tuple[int, ...] = ()
        kv_cache: KVCache | None = None
        if (config.cache.num_blocks or config.cache.memory) is not None:
            num_blocks = gang.least("KV blocks", size_cache(config, setup, more))
            kv_cache = allocate_cache(config, setup, num_blocks)
        params = reading.result()
        draft_params = None if reading_draft is None else reading_draft.result()
    if kv_cache is None:
        # A cache that takes what is left has to wait for the weights.
        num_blocks = gang.least("KV blocks", size_cache(config, setup, more))
        kv_cache = allocate_cache(config, setup, num_blocks)
    gang.meet(setup.layout)
    builder = BatchBuilder(setup.plan)
    programs = ModelPrograms(setup.parts, params, functions)
    drafter = None
    if draft is not None and draft_params is not None:
        around = Surroundings(config, setup, programs, num_blocks, builder, sampler)
        drafter = draft.make(draft_params, around)
    runner = JaxRunner(
        programs,
        kv_cache,
        setup.plan,
        sampler,
        hidden_size=setup.model.hidden_size,
        dtype=setup.dtype,
        follower=drafter,
        layout=setup.layout,
        transfers=block_transfers(config, setup),
    )
    return _Loaded(runner, num_blocks, builder, drafter)


def _load_pipeline(
    config: EngineConfig,
    setup: ModelSetup,
    text: Callable[[], Tokenizer | None],
    gang: Gang,
    progress: Progress | None,
) -> _Loaded:
    """A model whose layers are spread over stages."""
    assert gang is ALONE, "stages belong to one process"
    stages = stage_setups(setup)
    load_stages(setup, stages, progress)
    num_blocks = size_stages(config, setup, stages)
    sampler = _sampler(config, setup, text())
    runner = make_pipeline(config, setup, stages, num_blocks, sampler)
    return _Loaded(runner, num_blocks, BatchBuilder(setup.plan))


def _sampler(config: EngineConfig, setup: ModelSetup, tokenizer: Tokenizer | None) -> DeviceSampler:
    return DeviceSampler(
        setup.model.vocab_size,
        setup.plan,
        _eos_ids(setup.model, tokenizer),
        setup.ops.truncated_draw,
        setup.layout,
        typical_of(config.speculative),
    )


def assemble(
    config: EngineConfig,
    runner: Runner,
    plan: CompilePlan,
    num_blocks: tuple[int, ...],
    windows: tuple[int | None, ...],
    *,
    builder: BatchBuilder | None = None,
    drafter: DeviceDrafter | None = None,
    tokenizer: Tokenizer | None,
    chat_template: ChatTemplate,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    progress: Progress | None = None,
    sampling_defaults: Mapping[str, float] | None = None,
    text_path: Path | None = None,
    gang: Gang = ALONE,
    connector: KVConnector | None = None,
) -> Engine:
    """Puts scheduler, block pool, builder and core around a runner; tests call it with theirs.

    Args:
        connector: to other engines; the runner is a ``BlockWriter`` then. It is not started.
        builder: if the drafter shares it.
        drafter: one that computes K and V of its own; absent: the one that the configuration names.
    """
    kv = KVCacheManager(num_blocks, config.cache.block_size, windows, config.cache.prefix_caching)
    builder = builder or BatchBuilder(plan)
    compilations = CompilationMonitor(config.compile.on_recompile)
    programs = ProgramSeconds.guessed(plan) if config.speculative.adaptive else None
    if isinstance(runner, JaxRunner | PipelineRunner) and config.compile.warm_up == "full":
        runner.warm_up(
            builder, None if progress is None else lambda done, total: progress("compiling", done, total)
        )
        if config.speculative.adaptive and isinstance(runner, JaxRunner):
            # As far as decoding goes: one token of each sequence, and drafts.
            programs = runner.time_programs(builder, plan.row_buckets[-1])
        compilations.arm()
    chunk = config.scheduler.chunk_size or config.scheduler.max_num_batched_tokens
    limits = Limits(
        vocab_size, max_model_len, kv.max_tokens(chunk), num_blocks[0] - 1, config.cache.block_size
    )
    scheduler = Scheduler(config.scheduler, kv, _fetch_policy(config, connector))
    speculation = make_speculation(
        config.speculative,
        max_model_len,
        programs,
        config.scheduler.overlap > 0,
        beside=drafter,
        reserve=scheduler.reserve,
    )
    core = EngineCore(
        scheduler,
        builder,
        gang.leader(runner, plan),
        StopConditions(eos_token_ids),
        tokenizer,
        compilations,
        depth=config.scheduler.overlap,
        speculation=speculation,
        stages=config.parallel.pipeline,
    )
    grammars = None
    if tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids, config.structured)
    inputs = InputProcessor(
        tokenizer, limits, len(windows), eos_token_ids, grammars, config.structured.jump_ahead
    )
    if connector is not None:
        add_remote(core, connector, cast(BlockWriter, runner), inputs)
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
        gang,
    )


def _fetch_policy(config: EngineConfig, connector: KVConnector | None) -> FetchPolicy | None:
    settings = config.disaggregation
    if connector is None or not settings.decodes:
        return None
    return FetchPolicy(settings.min_tokens, settings.max_fetches, lambda: connector.available)


def _compile_first(setup: ModelSetup, sampler: DeviceSampler) -> StepFunctions:
    """The model's functions; what every request needs and no weights is compiled."""
    functions = StepFunctions.make(setup.parts, setup.plan, setup.groups, setup.layout)
    hidden_XD = jax.ShapeDtypeStruct((setup.plan.token_buckets[-1], setup.model.hidden_size), setup.dtype)
    functions.compile_head(setup.parts, hidden_XD, setup.plan.row_buckets[0], setup.layout)
    sampler.compile_one_row()
    return functions


def _text_path(config: EngineConfig, files: ModelFiles) -> Path | None:
    """Where the tokenizer is; None if the configuration says "none"."""
    if config.model.tokenizer == NO_TOKENIZER:
        return None
    named = config.model.tokenizer
    return files.tokenizer_path if named is None else resolve_reference(named)


def _eos_ids(model: TransformerConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's own end tokens, and the tokenizer's if the model names none."""
    return model.eos_token_ids or (() if tokenizer is None else tokenizer.eos_token_ids)
