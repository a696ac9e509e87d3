"""Configuration of an engine: frozen models by scope, read from YAML, environment and keyword overrides.

Later sources win: YAML file < environment (``JAXINFER_CACHE__NUM_BLOCKS=512``) < overrides. All errors are reported
at once, each with its path; an unknown key names the nearest known one.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxinfer.config_disaggregation import DisaggregationConfig
from jaxinfer.config_hosts import HostsConfig, check_hosts
from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.config_values import Bytes, Scope, from_environment, merge, nest, read_yaml, validated


class ModelConfig(Scope):
    """Which model, and how its weights are held.

    Attributes:
        reference: a directory, a file, ``hf:org/name`` or ``package:NAME/FILE``.
        sha256: expected digest of a single-file checkpoint.
        dtype: of weights and activations; ``auto`` follows the checkpoint.
        weights: how weights of matrix products and the embedding are held. ``stored``: as the checkpoint stores them,
            GGUF's blocks quantized and 16-bit values in 16 bits, and kernels that read this form compute with the exact
            values; an error where such kernels do not exist. ``float``: expanded to the dtype the model computes in.
            ``auto``: ``stored`` where the kernel backend can.
        activations: inputs of products with weights that are held as stored. ``float``: as they are, in float32.
            ``int8``, for quantized weights: rounded to 8 bits, a scale per row and block of the weight, as most engines
            do with such weights. ``bfloat16``, for weights of that type: rounded to it, as GPUs and other engines
            compute such models. Both are faster, and not exact. An error where no kernels do that, or no weight is held
            so.
        max_model_len: tokens of prompt and output together; the model's own limit if absent.
        tokenizer: directory or file, if it is not the model's own; ``none`` for a model that is used by token ids only.
    """

    reference: str = Field(min_length=1)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "stored", "float"] = "auto"
    activations: Literal["float", "int8", "bfloat16"] = "float"
    max_model_len: int | None = Field(default=None, ge=2)
    tokenizer: str | None = None


class CacheConfig(Scope):
    """The KV cache.

    Attributes:
        block_size: slots per block; a multiple of ``parallel.context``, whose devices hold a share of each block.
        num_blocks: blocks of the pool, block 0 (padding) included; overrides ``memory``.
        memory: bytes for the pool, as a number or "2GiB", on each device; absent: fitted to the device by measurement.
        dtype: ``auto`` is the dtype of the model; 1-byte types quantize with the checkpoint's scales.
        prefix_caching: reuse the blocks of equal prefixes.
    """

    block_size: int = Field(default=16, ge=1, le=256)
    num_blocks: int | None = Field(default=None, ge=2)
    memory: Bytes | None = Field(default=None, gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"] = "auto"
    prefix_caching: bool = True


class SchedulerConfig(Scope):
    """What runs in a step.

    Attributes:
        max_num_seqs: sequences that run at the same time (W batch slots).
        max_num_batched_tokens: tokens of one step.
        chunk_size: most prompt tokens of one sequence in a step; absent: limited by the step only.
        policy: ``fcfs``, or ``priority`` (smaller is more urgent; ties by arrival).
        max_preemptions: after so many preemptions in favour of more urgent requests a sequence keeps its place.
        overlap: steps that are planned before the tokens of the previous one are known: 0 or 1.
        max_waiting_seqs: admission limit; requests that would exceed it are refused.
        max_waiting_tokens: admission limit on the prompt tokens that wait.
    """

    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=512, ge=1)
    chunk_size: int | None = Field(default=None, ge=1)
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_preemptions: int = Field(default=3, ge=0)
    overlap: int = Field(default=1, ge=0, le=1)
    max_waiting_seqs: int | None = Field(default=None, ge=1)
    max_waiting_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _every_sequence_can_decode(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences could not all decode in one step"
            )
        return self


class CompileConfig(Scope):
    """Compilation.

    Attributes:
        warm_up: ``full`` compiles every program of the plan at start-up, ``lazy`` each at its first use.
        on_recompile: what a compilation after a full warm-up does.
        layers_per_segment: layers that compile as one program. Equal segments share it, so fewer layers compile faster
            and more layers dispatch faster.
        cache_dir: JAX's persistent compilation cache; ``none`` switches it off.
    """

    warm_up: Literal["full", "lazy"] = "full"
    on_recompile: Literal["allow", "warn", "error"] = "warn"
    layers_per_segment: int = Field(default=5, ge=1)
    cache_dir: str = "~/.cache/jaxinfer/xla"


class KernelConfig(Scope):
    """Op implementations.

    Attributes:
        backend: ``auto`` takes the best for the platform: ``triton`` on NVIDIA GPUs from Ampere on,
            ``native`` on x86-64 processors where its library was built, else ``xla``.
            ``mosaic`` is ``triton`` with Hopper's own attention of prefill chunks.
        strict: a fallback to ``xla`` is an error.
    """

    backend: Literal["auto", "xla", "native", "triton", "mosaic", "reference"] = "auto"
    strict: bool = False


class ParallelConfig(Scope):
    """Several devices for one model; see docs/parallel.md.

    Attributes:
        tensor: devices that share every layer: its heads, the width of its MLP, and the vocabulary.
        expert: devices, times ``tensor``, that share the experts of sparse layers; they also share all else.
        context: devices, times ``tensor`` x ``expert``, that share the KV cache of every sequence; they also share all
            else but the projection that makes queries, keys and values.
        pipeline: stages of consecutive layers, each on ``tensor`` x ``expert`` x ``context`` devices of its own.
        stage_layers: layers of each stage; absent: as even as possible.
        exchange_rows: in programs of so many tokens and more, the devices along ``expert`` split the tokens of sparse
            layers and send them to the devices of their experts; absent: none do.
    """

    tensor: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    stage_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    exchange_rows: int | None = Field(default=None, ge=1)

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert * self.context * self.pipeline

    @model_validator(mode="after")
    def _exchange_needs_others(self) -> Self:
        if self.exchange_rows is not None and self.expert == 1:
            raise ValueError("exchange_rows is set, but expert is 1: nobody is there to exchange tokens with")
        if self.exchange_rows is not None and self.context > 1:
            raise ValueError(
                f"exchange_rows is set and context is {self.context}: devices that share a context exchange no tokens"
            )
        return self

    @model_validator(mode="after")
    def _layers_of_every_stage(self) -> Self:
        if self.stage_layers is not None and len(self.stage_layers) != self.pipeline:
            raise ValueError(
                f"stage_layers names {len(self.stage_layers)} stages, but pipeline is {self.pipeline}"
            )
        return self


class StructuredConfig(Scope):
    """Grammars.

    Attributes:
        max_grammar_bytes: longest schema, expression or grammar text.
        compile_timeout: seconds until a grammar is refused as too complex.
        jump_ahead: append tokens that the grammar forces without sampling them.
    """

    max_grammar_bytes: int = Field(default=256 * 1024, ge=1)
    compile_timeout: float = Field(default=5.0, gt=0)
    jump_ahead: bool = True


class ServerConfig(Scope):
    """The HTTP server.

    Attributes:
        engine: where the step loop runs: in a ``process`` of its own, or on a ``thread`` of the server.
        served_model_names: names that requests may give as ``model``; the first is shown. Absent: derived from the
            reference.
        api_keys: bearer tokens that open ``/v1``; empty: no authentication.
        cors_origins: origins that browsers may call from.
        max_body_bytes: longer request bodies are a 413.
        max_prompts, max_choices, max_stop_strings, max_bad_words: limits of one request.
        max_buffered_tokens: tokens, and log-probabilities of alternatives, that wait for a slow reader before its
            request is aborted.
        tool_parser, reasoning_parser: how calls and reasoning are read from the model's text; ``auto`` looks at the
            chat template.
        reasoning_field: name of the reasoning text in answers.
        plain_special_tokens: special-token strings inside messages are plain text.
        chat_template: file that replaces the model's.
        vllm_metrics: also export the metrics under their vLLM names.
        force_include_usage: streams report usage although the request does not ask for it.
        sse_keep_alive: seconds between comments on a silent stream; absent: none.
        watchdog: seconds without a finished step, while work waits, until the engine counts as dead.
        shutdown_timeout: seconds that requests in flight get after SIGTERM.
        retry_after: seconds told to clients that are refused for overload.
        profile_directory: where profiles go; absent: the profiler endpoints are off.
        dashboard: serve ``/dashboard``.
        otlp_endpoint: where spans go (extra ``otel``); absent: no tracing.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    engine: Literal["process", "thread"] = "process"
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: Bytes = Field(default=32 * 1024 * 1024, gt=0)
    max_prompts: int = Field(default=1024, ge=1)
    max_choices: int = Field(default=128, ge=1)
    max_stop_strings: int = Field(default=16, ge=1)
    max_bad_words: int = Field(default=128, ge=1)
    max_buffered_tokens: int = Field(default=4096, ge=1)
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "deepseek", "json"] = "auto"
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    plain_special_tokens: bool = False
    chat_template: str | None = None
    vllm_metrics: bool = False
    force_include_usage: bool = False
    sse_keep_alive: float | None = Field(default=None, gt=0)
    watchdog: float = Field(default=120.0, gt=0)
    shutdown_timeout: float = Field(default=30.0, ge=0)
    retry_after: int = Field(default=1, ge=1)
    profile_directory: str | None = None
    dashboard: bool = True
    otlp_endpoint: str | None = None


class EngineConfig(Scope):
    """Everything an engine, and the server around it, is built from."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig()
    kernel: KernelConfig = KernelConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    structured: StructuredConfig = StructuredConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _a_tree_fits_a_step(self) -> Self:
        speculative, limit = self.speculative, self.scheduler.max_num_batched_tokens
        needed = 1 + (speculative.tree_depth - 1) * speculative.tree_top_k
        if speculative.trees and speculative.drafter == "head" and needed > limit:
            raise ValueError(
                f"speculative.tree_depth and tree_top_k: a tree that grows takes (depth - 1) * top_k + 1 = {needed} "
                f"tokens in a step, but scheduler.max_num_batched_tokens is {limit}"
            )
        return self

    @model_validator(mode="after")
    def _one_device_features(self) -> Self:
        devices = self.parallel.num_devices
        if devices > 1 and self.model.weights == "stored":
            raise ValueError(
                f"model.weights is 'stored' and parallel asks for {devices} devices: weights in the form in which a "
                "checkpoint stores them are not spread over devices; allowed are auto and float"
            )
        if devices > 1 and self.model.activations != "float":
            raise ValueError(
                f"model.activations is {self.model.activations!r} and parallel asks for {devices} devices: rounded "
                "activations need weights in the form in which a checkpoint stores them, which are not spread over "
                "devices; allowed is float"
            )
        if devices > 1 and self.speculative.model is not None:
            raise ValueError(
                f"speculative.model is set and parallel asks for {devices} devices: draft models and heads need one "
                "device; drafters without a model (ngram, suffix) work"
            )
        if self.parallel.pipeline > 1 and self.speculative.adaptive:
            raise ValueError(
                f"speculative.adaptive measures whole steps, which parallel.pipeline ({self.parallel.pipeline} stages) "
                "does not have; switch one of them off"
            )
        return self

    @model_validator(mode="after")
    def _what_shares_a_context(self) -> Self:
        context = self.parallel.context
        if self.cache.block_size % context:
            raise ValueError(
                f"cache.block_size is {self.cache.block_size} and parallel.context is {context}: each device holds as "
                f"many slots of every block, so the size must be a multiple of {context}"
            )
        if context > 1 and self.disaggregation.role != "none":
            raise ValueError(
                f"disaggregation.role is {self.disaggregation.role!r} and parallel.context is {context}: blocks whose "
                "slots several devices share do not travel; allowed is context 1"
            )
        if context > 1 and self.hosts.several:
            raise ValueError(
                f"hosts.count is {self.hosts.count} and parallel.context is {context}: devices that share a context "
                "belong to one process; several hosts share layers and experts (parallel.tensor, parallel.expert)"
            )
        return self

    @model_validator(mode="after")
    def _what_several_hosts_can(self) -> Self:
        check_hosts(self.hosts, self.parallel.num_devices, self.parallel.pipeline, self.server.engine)
        return self

    @model_validator(mode="after")
    def _what_goes_with_disaggregation(self) -> Self:
        role = self.disaggregation.role
        if role != "none" and self.parallel.pipeline > 1:
            raise ValueError(
                f"disaggregation.role is {role!r} and parallel.pipeline is {self.parallel.pipeline}: blocks of a "
                "pipeline do not travel; allowed is pipeline 1"
            )
        if role != "none" and self.hosts.several:
            raise ValueError(
                f"disaggregation.role is {role!r} and hosts.count is {self.hosts.count}: blocks of an engine on "
                "several hosts do not travel; allowed is one process with several devices"
            )
        if self.disaggregation.decodes and self.speculative.model is not None:
            raise ValueError(
                f"disaggregation.role is {role!r} and speculative.model is set: draft models and heads have K and V of "
                "their own, which a prefill engine does not compute; drafters without a model (ngram, suffix) work"
            )
        return self

    @classmethod
    def load(
        cls,
        source: "str | Path | EngineConfig",
        overrides: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:
        """Reads a configuration.

        Args:
            source: a YAML file, a model reference, or a configuration.
            overrides: values by dotted path ("cache.num_blocks"), by scope (``{"cache": {...}}``), or by a bare
                field name; a bare name that two scopes have means the first scope (model before cache).
            defaults: values by dotted path that replace the built-in defaults.

        Raises:
            ConfigError: lists every problem.
        """
        problems: list[str] = []
        tree: dict[str, Any] = {}
        for key, value in (defaults or {}).items():
            merge(tree, nest(key, value, cls, problems))
        if isinstance(source, EngineConfig):
            merge(tree, source.model_dump(exclude_unset=True))
        elif str(source).endswith((".yaml", ".yml")):
            merge(tree, read_yaml(Path(source), cls))
        else:
            merge(tree, {"model": {"reference": str(source)}})
        if not isinstance(source, EngineConfig):
            merge(tree, from_environment(os.environ, cls, problems))
        for key, value in (overrides or {}).items():
            merge(tree, nest(key, value, cls, problems))
        return validated(cls, tree, source, problems)
