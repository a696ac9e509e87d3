"""How many GPUs of its node a replica reserves."""

from collections.abc import Mapping, Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from serve.context import served_names
from serve.replicas.config import ModelPool, ReplicasConfig


def with_gpus(
    config: ReplicasConfig,
    engines: Sequence[EngineConfig],
    available: float,
    environment: Mapping[str, str],
) -> ReplicasConfig:
    """The configuration with ``resources.num_gpus`` of every model.

    Args:
        engines: of the models, in their order.
        available: GPUs of the cluster.
        environment: of the replicas, where ``resources.environment`` says nothing else.

    Raises:
        ConfigError: fewer are asked for than a replica uses: replicas would meet on one GPU.
    """
    models = [
        _with_gpus(pool, engine, available, environment)
        for pool, engine in zip(config.models, engines, strict=True)
    ]
    return config.model_copy(update={"models": tuple(models)})


def _with_gpus(
    pool: ModelPool, engine: EngineConfig, available: float, environment: Mapping[str, str]
) -> ModelPool:
    on_processors = {**environment, **pool.resources.environment}.get("JAX_PLATFORMS") == "cpu"
    used = 0 if not available or on_processors else engine.parallel.num_devices
    given = pool.resources.num_gpus
    if given is None:
        resources = pool.resources.model_copy(update={"num_gpus": float(used)})
        return pool.model_copy(update={"resources": resources})
    if given < used:
        raise ConfigError(
            f"{served_names(engine)[0]}: resources.num_gpus is {given:g}, but a replica uses {used} (parallel), and "
            "others would be put on the same; without it so many are reserved. For replicas on processors set "
            "JAX_PLATFORMS to cpu in resources.environment"
        )
    return pool


def check_room(config: ReplicasConfig, available: float) -> None:
    """For a machine of our own, which does not grow.

    Args:
        config: with GPUs.

    Raises:
        ConfigError: the replicas to start with would wait for GPUs forever.
    """
    needed = sum(pool.scaling.min_replicas * (pool.resources.num_gpus or 0) for pool in config.models)
    if needed > available:
        raise ConfigError(
            f"the replicas need {needed:g} GPUs (scaling.min_replicas x resources.num_gpus), but this machine has "
            f"{available:g}"
        )
