"""``jaxinfer serve --replicas ray``: the replicas of a file, or two of one model, until a signal."""

from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError, read_mapping
from serve.replicas.config import IngressConfig, ModelPool, ReplicasConfig, ScalingConfig

DEFAULT_REPLICAS = 2


def load(source: str, overrides: dict[str, Any]) -> ReplicasConfig:
    """The configuration that a command line means.

    Args:
        source: the YAML file of a ``ReplicasConfig``, or what ``jaxinfer serve`` takes without replicas: that model
            gets ``DEFAULT_REPLICAS`` replicas.
        overrides: values by dotted path, of the engine; of the ``ingress`` for a ``ReplicasConfig``.

    Raises:
        ConfigError: lists every problem.
    """
    if source.endswith((".yaml", ".yml")) and "models" in (tree := read_mapping(Path(source))):
        return ReplicasConfig.of(
            {**tree, "ingress": {**(tree.get("ingress") or {}), **_ingress(overrides)}}, source
        )
    engine = EngineConfig.load(source, overrides)
    scaling = ScalingConfig(min_replicas=DEFAULT_REPLICAS, max_replicas=DEFAULT_REPLICAS)
    if not engine.server.port:
        raise ConfigError(
            "server.port is 0, which means any free one, but Ray has to be told; allowed are 1 to 65535"
        )
    pool = ModelPool(config=source, overrides=overrides, scaling=scaling)
    return ReplicasConfig(models=(pool,), ingress=IngressConfig.like(engine.server))


def _ingress(overrides: dict[str, Any]) -> dict[str, Any]:
    """``server`` stands for the ingress, as in ``--port``."""
    values = {}
    for key, value in overrides.items():
        scope, _, name = key.partition(".")
        if scope not in ("ingress", "server"):
            raise ConfigError(
                f"{key}: the file describes several engines; values of one are set under its overrides"
            )
        values[name] = value
    return values


def serve_replicas(config: ReplicasConfig) -> int:
    """Returns the exit status.

    Raises:
        ConfigError: Ray is not installed, or the configuration is wrong.
    """
    try:
        from serve.replicas.ray_run import run
    except ImportError as error:
        raise ConfigError(
            f"--replicas ray needs the extra ray ({error}): pip install 'jaxinfer[ray]'"
        ) from error
    return run(config)
