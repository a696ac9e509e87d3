"""Configuration of models that are served by several replicas behind ingresses; see docs/replicas.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import time
from typing import Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.config_values import Bytes, ConfigError, Scope, validated
from serve.context import served_names

Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
WEEKDAYS: tuple[Weekday, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
REPORT_INTERVAL = 10.0
"""Seconds between two reports of a replica for scaling; Ray's, whose setting for it is deprecated."""


class RoutingConfig(Scope):
    """Which replica gets a request; see ``serve.replicas.policy``.

    Attributes:
        policy: ``prefix`` weighs cached prefixes, load and KV usage; ``round_robin`` looks at nothing.
        request_tokens: prompt tokens to compute that one more request in flight is worth.
        kv_tokens: the same for a KV cache that is full instead of ``kv_limit`` full.
        kv_limit: KV usage from which on a replica is avoided.
        max_imbalance: requests that a replica may have above the least loaded one and still be preferred for its
            cached prefix.
        remembered_blocks: blocks of prompts that an ingress remembers of each replica.
    """

    policy: Literal["prefix", "round_robin"] = "prefix"
    request_tokens: int = Field(default=128, ge=0)
    kv_tokens: int = Field(default=2048, ge=0)
    kv_limit: float = Field(default=0.8, ge=0, lt=1)
    max_imbalance: int = Field(default=16, ge=1)
    remembered_blocks: int = Field(default=65536, ge=1)


class Peak(Scope):
    """Times of the day at which a load is known to come.

    Attributes:
        start, end: wall-clock times; an end that is not later than the start is on the next day.
        days: on which it starts.
        min_replicas: least replicas in that time.
    """

    start: time
    end: time
    days: tuple[Weekday, ...] = WEEKDAYS
    min_replicas: int = Field(ge=1)

    @field_validator("start", "end", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any) -> Any:
        """YAML reads 18:00 without quotes as the number 1080."""
        if not isinstance(value, str | time):
            raise ValueError('a time of the day is a text in quotes, such as "18:00"')
        return value


class ScalingConfig(Scope):
    """How many replicas there are.

    Attributes:
        min_replicas, max_replicas: bounds; equal ones switch autoscaling off.
        target_requests: requests in flight, waiting ones included, that one replica is wanted for.
        target_kv_usage: share of its KV cache that a replica is to have in use.
        upscale_delay, downscale_delay: seconds for which more or fewer replicas must have been wanted.
        look_back: seconds over which the load is averaged. Replicas report it every 10 s, so it has to be longer.
        peaks: scheduled minimums.
        timezone: of the peaks, such as Europe/Berlin.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_requests: float = Field(default=32, gt=0)
    target_kv_usage: float = Field(default=0.7, gt=0, le=1)
    upscale_delay: float = Field(default=10, ge=0)
    downscale_delay: float = Field(default=300, ge=0)
    look_back: float = Field(default=15, gt=REPORT_INTERVAL)
    peaks: tuple[Peak, ...] = ()
    timezone: str = "UTC"

    @property
    def automatic(self) -> bool:
        return self.min_replicas != self.max_replicas

    @field_validator("timezone")
    @classmethod
    def _known_timezone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{name!r} is no time zone; write for example UTC or Europe/Berlin") from None
        return name

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        for peak in self.peaks:
            if peak.min_replicas > self.max_replicas:
                raise ValueError(
                    f"a peak asks for {peak.min_replicas} replicas, but max_replicas is {self.max_replicas}"
                )
        return self


class ResourcesConfig(Scope):
    """What Ray reserves for one replica on a node.

    Attributes:
        num_cpus: of the node.
        num_gpus: of the node. Absent: the devices of ``parallel`` where the cluster has GPUs, else none.
        environment: variables of the replica's process.
    """

    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    environment: Mapping[str, str] = Field(default_factory=dict)


class ModelPool(Scope):
    """One model and its replicas.

    Attributes:
        config: the engine's YAML file, or a model reference.
        overrides: configuration values by dotted path.
        scaling, routing, resources: see there.
        on_loss: what happens to a request whose replica dies after the first token: it ends with an ``error``, or
            another replica is to ``continue`` from prompt and tokens so far, where that gives what the lost one
            would have given; see ``serve.replicas.continuation``.
        max_attempts: replicas that a request is tried on.
    """

    config: str = Field(min_length=1)
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    scaling: ScalingConfig = ScalingConfig()
    routing: RoutingConfig = RoutingConfig()
    resources: ResourcesConfig = ResourcesConfig()
    on_loss: Literal["error", "continue"] = "error"
    max_attempts: int = Field(default=3, ge=1)

    def engine(self) -> EngineConfig:
        """The engine's configuration; files and environment are read here.

        Raises:
            ConfigError: it is wrong.
        """
        return EngineConfig.load(self.config, dict(self.overrides))


class IngressConfig(Scope):
    """The processes that speak HTTP. What concerns one model (names, parsers, limits of requests) is in the ``server``
    scope of its own configuration.

    Attributes:
        replicas: how many.
        num_cpus: of the node, for each.
        host, port: of ``jaxinfer serve``; an application file of Ray has its own.
        api_keys, cors_origins, max_body_bytes, shutdown_timeout, retry_after: as in ``ServerConfig``.
    """

    replicas: int = Field(default=2, ge=1)
    num_cpus: float = Field(default=1, ge=0)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: Bytes = Field(default=32 * 1024 * 1024, gt=0)
    shutdown_timeout: float = Field(default=30.0, ge=0)
    retry_after: int = Field(default=1, ge=1)

    @classmethod
    def like(cls, server: ServerConfig) -> Self:
        """That of a server with one engine."""
        return cls(**server.model_dump(include=_COMMON & server.model_fields_set))

    def server(self) -> ServerConfig:
        return ServerConfig(**self.model_dump(include=_COMMON))


_COMMON = {"host", "port", "api_keys", "cors_origins", "max_body_bytes", "shutdown_timeout", "retry_after"}


class ReplicasConfig(Scope):
    """Models behind common ingresses.

    Attributes:
        models: requests without a ``model`` go to the first.
    """

    models: tuple[ModelPool, ...]
    ingress: IngressConfig = IngressConfig()

    @field_validator("models")
    @classmethod
    def _some_model(cls, models: tuple[ModelPool, ...]) -> tuple[ModelPool, ...]:
        if not models:
            raise ValueError("at least one model is needed")
        return models

    def engines(self) -> tuple[EngineConfig, ...]:
        """The configurations of the engines, in the order of the models.

        Raises:
            ConfigError: one is wrong, or they do not go together.
        """
        engines = tuple(pool.engine() for pool in self.models)
        check_names([served_names(engine) for engine in engines])
        for engine in engines:
            if set(engine.server.api_keys) - set(self.ingress.api_keys):
                raise ConfigError(
                    f"{served_names(engine)[0]}: server.api_keys would have no effect; keys are those of the ingress "
                    "(ingress.api_keys), for all models"
                )
            _check_alone(engine)
        return engines

    @classmethod
    def of(cls, tree: Mapping[str, Any], source: Any = "of the replicas") -> Self:
        """Raises:
        ConfigError: lists every problem.
        """
        return validated(cls, tree, source)


def _check_alone(engine: EngineConfig) -> None:
    """Raises:
    ConfigError: the replicas would need addresses of their own, and all have this configuration.
    """
    name = served_names(engine)[0]
    if engine.hosts.several:
        raise ConfigError(
            f"{name}: hosts.count is {engine.hosts.count}: a replica is one process on one node; an engine on several "
            "hosts is served without --replicas"
        )
    if engine.disaggregation.prefills:
        raise ConfigError(
            f"{name}: disaggregation.role is {engine.disaggregation.role!r}: replicas on a node would all listen at "
            f"{engine.disaggregation.bind}; allowed are none and decode"
        )


def check_names(names: Sequence[Sequence[str]]) -> None:
    """Raises:
    ConfigError: two models have the same served name.
    """
    twice = [name for name, count in Counter(n for model in names for n in model).items() if count > 1]
    if twice:
        raise ConfigError(
            f"several models are served as {', '.join(twice)}: give each server.served_model_names, under overrides"
        )
