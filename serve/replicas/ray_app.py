"""The Ray Serve application: ingresses in front of deployments of engines.

``serve run serve.replicas.ray_app:build_app models=...``, or the ``import_path`` of an application in a Ray Serve file
such as ``configs/ray/smollm2.yaml``. Nothing but this module and its ``ray_*`` neighbours imports Ray (extra ``ray``).
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from jaxinfer.config import EngineConfig
from serve.context import served_names
from serve.replicas.app import ServedModel, create_ingress
from serve.replicas.client import ReplicasClient
from serve.replicas.config import ModelPool, ReplicasConfig, ScalingConfig
from serve.replicas.gpus import with_gpus
from serve.replicas.policy import RouteKey
from serve.replicas.ray_scaling import DemandPolicy
from serve.replicas.ray_transport import RayTransport
from serve.replicas.replica import start_replica
from serve.run import EngineSource, default_source

logger = logging.getLogger(__name__)

MAX_ONGOING = 8192
"""Requests that Ray hands to one replica or ingress: the engine has limits of its own, which answer with a reason."""
STATS_INTERVAL = 1.0
HEALTH_INTERVAL = 2.0
ENGINE_INTERVAL = 0.25
NAME = "jaxinfer"


class EngineReplica:
    """A replica that owns an engine."""

    async def __init__(self, config: str, source: EngineSource) -> None:  # type: ignore[misc]
        """Ray awaits it."""
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = await start_replica(name, EngineConfig.model_validate_json(config), source)
        self._watching = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """A replica whose engine is dead ends, so that Ray starts another one at once; streams get to know first."""
        while self._replica.healthy:
            await asyncio.sleep(ENGINE_INTERVAL)
        logger.error("the engine is dead, and so the replica ends")
        await asyncio.sleep(ENGINE_INTERVAL)
        os._exit(1)

    async def describe(self) -> bytes:
        return self._replica.describe()

    async def generate(self, submission: bytes, key: RouteKey) -> AsyncGenerator[bytes, None]:
        """``key`` is for the router."""
        async for data in self._replica.generate(submission):
            yield data

    async def report(self) -> bytes:
        return self._replica.report()

    async def reset_prefix_cache(self) -> int:
        return await self._replica.reset_prefix_cache()

    async def record_routing_stats(self) -> dict[str, float]:
        return self._replica.load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.load()

    async def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        self._watching.cancel()
        await self._replica.shutdown()


class Ingress:
    """An HTTP front end of all models."""

    async def __init__(self, config: str, *engines: str | DeploymentHandle) -> None:  # type: ignore[misc]
        """Ray awaits it.

        Args:
            engines: for each model, the configuration of its engine and the handle of its deployment.
        """
        settings = ReplicasConfig.model_validate_json(config)
        models = []
        for pool, engine, handle in zip(settings.models, engines[::2], engines[1::2], strict=True):
            engine_config = EngineConfig.model_validate_json(engine)
            client = await ReplicasClient.start(engine_config, pool, RayTransport(handle))
            models.append(ServedModel(engine_config, client))
        self._app = create_ingress(models, settings.ingress.server(), uuid.uuid4().hex[:8])

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def build_app(args: Mapping[str, Any]) -> Application:
    """Ray Serve's builder.

    Args:
        args: a ``ReplicasConfig`` as plain data.

    Raises:
        ConfigError: it, or the configuration of a model, is wrong.
    """
    return application(ReplicasConfig.of(args))


def application(config: ReplicasConfig, source: EngineSource | None = None) -> Application:
    """Args:
    source: where engines come from; benchmarks bring theirs.

    Raises:
        ConfigError: the configuration of a model is wrong, or its replicas would share GPUs.
    """
    engines = config.engines()
    config = with_gpus(config, engines, gpus_of_cluster(), os.environ)
    bound: list[Any] = []
    for pool, engine in zip(config.models, engines, strict=True):
        deployment = serve.deployment(EngineReplica).options(**_engine_options(pool, engine))
        bound += [
            engine.model_dump_json(),
            deployment.bind(engine.model_dump_json(), source or default_source()),
        ]
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        num_replicas=config.ingress.replicas,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.ingress.shutdown_timeout,
    )
    return ingress.bind(config.model_dump_json(), *bound)


def gpus_of_cluster() -> float:
    """None without one, as when Ray Serve builds a file for later."""
    return float(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0.0


def _engine_options(pool: ModelPool, engine: EngineConfig) -> dict[str, Any]:
    resources = pool.resources
    actor: dict[str, Any] = {"num_cpus": resources.num_cpus, "num_gpus": resources.num_gpus}
    if resources.environment:
        actor["runtime_env"] = {"env_vars": dict(resources.environment)}
    options: dict[str, Any] = {
        "name": served_names(engine)[0].replace("/", "--"),
        "ray_actor_options": actor,
        "max_ongoing_requests": MAX_ONGOING,
        "request_router_config": RequestRouterConfig(
            request_router_class="serve.replicas.ray_router:PolicyRouter",
            request_router_kwargs=pool.routing.model_dump(),
            request_routing_stats_period_s=STATS_INTERVAL,
        ),
        "health_check_period_s": HEALTH_INTERVAL,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": engine.server.shutdown_timeout,
    }
    if pool.scaling.automatic:
        options["autoscaling_config"] = _autoscaling(pool.scaling)
    else:
        options["num_replicas"] = pool.scaling.min_replicas
    return options


def _autoscaling(scaling: ScalingConfig) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay,
        downscale_delay_s=scaling.downscale_delay,
        look_back_period_s=scaling.look_back,
        policy=AutoscalingPolicy(
            policy_function=DemandPolicy, policy_kwargs={"scaling": scaling.model_dump(mode="json")}
        ),
    )
