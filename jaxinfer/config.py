"""Configuration of an engine: frozen models by scope, read from YAML, environment and keyword overrides.

Later sources win: YAML file < environment (``JAXINFER_CACHE__NUM_BLOCKS=512``) < overrides. All errors are reported
at once, each with its path; an unknown key names the nearest known one.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

ENVIRONMENT_PREFIX = "JAXINFER_"


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every problem with its path."""


def parse_bytes(value: Any) -> Any:
    """Turns "512MiB", "2GB" or "1.5 GiB" into a number of bytes; other values pass through."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GB")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class Scope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Scope):
    """Which model, and how its weights are held.

    Attributes:
        reference: a directory, a file, ``hf:org/name`` or ``package:NAME/FILE``.
        sha256: expected digest of a single-file checkpoint.
        dtype: of weights and activations; ``auto`` follows the checkpoint.
        max_model_len: tokens of prompt and output together; the model's own limit if absent.
        tokenizer: directory or file, if it is not the model's own; ``none`` for a model that is used by token ids only.
    """

    reference: str = Field(min_length=1)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    tokenizer: str | None = None


class CacheConfig(Scope):
    """The KV cache.

    Attributes:
        block_size: slots per block.
        num_blocks: blocks of the pool, block 0 (padding) included; overrides ``memory``.
        memory: bytes for the pool, as a number or "2GiB"; absent: fitted to the device by measurement.
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
        backend: ``auto`` takes the best for the platform: ``triton`` on NVIDIA GPUs from Ampere on, else ``xla``.
            ``mosaic`` is ``triton`` with Hopper's own attention of prefill chunks.
        strict: a fallback to ``xla`` is an error.
    """

    backend: Literal["auto", "xla", "triton", "mosaic", "reference"] = "auto"
    strict: bool = False


class SpeculativeConfig(Scope):
    """Speculative decoding: several tokens a step, the same tokens as without it.

    Attributes:
        drafter: what guesses tokens: ``none``, ``ngram`` (prompt lookup), ``path.py:Class`` for one of your own (called
            with this configuration; see ``jaxinfer.speculative.drafter.Drafter``), or the name of an entry point in the
            group ``jaxinfer.drafters``.
        max_drafts: most drafts of a sequence in a step.
        max_step_drafts: most drafts of all sequences in a step.
        ngram_longest, ngram_shortest: lengths of the token sequences that ``ngram`` looks up.
    """

    drafter: str = Field(default="none", min_length=1)
    max_drafts: int = Field(default=8, ge=1, le=64)
    max_step_drafts: int = Field(default=64, ge=1)
    ngram_longest: int = Field(default=4, ge=1)
    ngram_shortest: int = Field(default=2, ge=1)

    @property
    def draft_limits(self) -> tuple[int, int]:
        """Most drafts of a sequence, and of all of them, in a step; 0 without speculation."""
        return (0, 0) if self.drafter == "none" else (self.max_drafts, self.max_step_drafts)

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> Self:
        if self.ngram_shortest > self.ngram_longest:
            raise ValueError(
                f"ngram_shortest ({self.ngram_shortest}) must be at most ngram_longest ({self.ngram_longest})"
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
    structured: StructuredConfig = StructuredConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    server: ServerConfig = ServerConfig()

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
            _merge(tree, _nest(key, value, problems))
        if isinstance(source, EngineConfig):
            _merge(tree, source.model_dump(exclude_unset=True))
        elif str(source).endswith((".yaml", ".yml")):
            _merge(tree, _read_yaml(Path(source)))
        else:
            _merge(tree, {"model": {"reference": str(source)}})
        if not isinstance(source, EngineConfig):
            _merge(tree, _from_environment(os.environ, problems))
        for key, value in (overrides or {}).items():
            _merge(tree, _nest(key, value, problems))
        problems += _unknown_keys(tree)
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            problems += [_describe(e) for e in error.errors() if e["type"] != "extra_forbidden"]
            raise ConfigError(_report(problems, source)) from None
        if problems:
            raise ConfigError(_report(problems, source))
        return config


def _scopes() -> dict[str, type[Scope]]:
    return {
        name: field.annotation
        for name, field in EngineConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Scope)
    }


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration file {path} must hold a mapping with the scopes {', '.join(_scopes())}"
        )
    return tree


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                problems.append(f"{name}: {text[:80]!r} is not a YAML value")
                continue
            _merge(tree, _nest(key, value, problems))
    return tree


def _nest(key: str, value: Any, problems: list[str]) -> dict[str, Any]:
    if "." in key:
        scope, field = key.split(".", 1)
        return {scope: {field: value}}
    if key in _scopes():
        return {key: {"reference": value} if key == "model" and isinstance(value, str) else value}
    for scope, model in _scopes().items():
        if key in model.model_fields:
            return {scope: {key: value}}
    known = [field for model in _scopes().values() for field in model.model_fields]
    problems.append(f"{key}: unknown key{_nearest(key, known)}")
    return {}


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            tree[key] = {**tree[key], **value}
        else:
            tree[key] = value


def _unknown_keys(tree: Mapping[str, Any]) -> list[str]:
    problems = []
    scopes = _scopes()
    for scope, values in tree.items():
        if scope not in scopes:
            problems.append(f"{scope}: unknown scope{_nearest(scope, list(scopes))}")
        elif isinstance(values, Mapping):
            known = list(scopes[scope].model_fields)
            problems += [
                f"{scope}.{k}: unknown key{_nearest(str(k), known)}" for k in values if k not in known
            ]
    return problems


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def _describe(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    given = "" if error["type"] == "missing" else f" (given: {str(error['input'])[:80]})"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}{given}"


def _report(problems: list[str], source: Any) -> str:
    name = "configuration" if isinstance(source, EngineConfig) else f"configuration {source}"
    return f"{name} is wrong:\n" + "\n".join(f"  {p}" for p in problems)
