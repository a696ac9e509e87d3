"""Starts the application on a Ray cluster, or on a local one that is made for it, and stops it again."""

import logging
import math
import os
import signal
import sys

import ray
from ray import serve

from serve.context import served_names
from serve.replicas.config import ReplicasConfig
from serve.replicas.gpus import check_room, with_gpus
from serve.replicas.ray_app import NAME, application, gpus_of_cluster
from serve.replicas.stop import Stop

logger = logging.getLogger(__name__)


def run(config: ReplicasConfig) -> int:
    """Serves until SIGTERM or SIGINT. Requests in flight get ``ingress.shutdown_timeout`` seconds to end; a second
    signal, or one before it serves, ends it at once.

    With ``RAY_ADDRESS``, the application runs on that cluster, which stays when this process ends.

    Returns:
        The exit status: 1 if the application cannot be started.

    Raises:
        ConfigError: the configuration is wrong.
    """
    config.engines()  # what is wrong is said before Ray starts
    own = "RAY_ADDRESS" not in os.environ
    _connect(config, own)
    stop = Stop()
    for signum in (signal.SIGTERM, signal.SIGINT):  # Ray has handlers of its own
        signal.signal(signum, stop)
    try:
        return _serve(config, own, stop)
    finally:
        if own:
            serve.shutdown()
        ray.shutdown()


def _connect(config: ReplicasConfig, own: bool) -> None:
    if not own:
        ray.init(configure_logging=False)
        return
    # Reservations of one machine are for nobody else: all of what is asked for has to fit.
    ray.init(
        address="local",
        num_cpus=max(_cpus(config), os.cpu_count() or 1),
        include_dashboard=False,
        configure_logging=False,
    )


def _serve(config: ReplicasConfig, own: bool, stop: Stop) -> int:
    engines, gpus = config.engines(), gpus_of_cluster()
    # A cluster that is there does not inherit this environment.
    config = with_gpus(config, engines, gpus, os.environ if own else {})
    if own:
        check_room(config, gpus)
    app = application(config)
    serve.start(http_options={"host": config.ingress.host, "port": config.ingress.port})
    try:
        try:
            serve.run(app, name=NAME, route_prefix="/")
        except RuntimeError as error:
            logger.error("the application cannot be started: %s", error)
            return 1
        stop.started()
        names = ", ".join(served_names(engine)[0] for engine in engines)
        address = f"http://{config.ingress.host}:{config.ingress.port}"
        print(f"serving {names} at {address}", file=sys.stderr, flush=True)
        received = stop.wait()
    finally:
        serve.delete(NAME)
    return 0 if received == signal.SIGTERM else 128 + received


def _cpus(config: ReplicasConfig) -> int:
    replicas = sum(pool.scaling.max_replicas * pool.resources.num_cpus for pool in config.models)
    return math.ceil(replicas + config.ingress.replicas * config.ingress.num_cpus)
