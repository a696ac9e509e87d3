"""Starts the application on a Ray cluster, or on a local one that is made for it, and stops it again."""

import math
import os
import signal
import sys
import threading

import ray
from ray import serve

from serve.context import served_names
from serve.replicas.config import ReplicasConfig
from serve.replicas.ray_app import NAME, application


def run(config: ReplicasConfig) -> int:
    """Serves until SIGTERM or SIGINT. Requests in flight get ``ingress.shutdown_timeout`` seconds to end.

    With ``RAY_ADDRESS``, the application runs on that cluster, which stays when this process ends.
    """
    app = application(config)
    stopped = threading.Event()
    received: list[int] = []

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        stopped.set()

    own = "RAY_ADDRESS" not in os.environ
    if own:
        # Reservations of one machine are for nobody else: all of what is asked for has to fit.
        ray.init(
            address="local",
            num_cpus=max(_cpus(config), os.cpu_count() or 1),
            include_dashboard=False,
            configure_logging=False,
        )
    else:
        ray.init(configure_logging=False)
    for signum in (signal.SIGTERM, signal.SIGINT):  # Ray has handlers of its own
        signal.signal(signum, stop)
    try:
        serve.start(http_options={"host": config.ingress.host, "port": config.ingress.port})
        try:
            serve.run(app, name=NAME, route_prefix="/")
            names = ", ".join(served_names(engine)[0] for engine in config.engines())
            address = f"http://{config.ingress.host}:{config.ingress.port}"
            print(f"serving {names} at {address}", file=sys.stderr, flush=True)
            stopped.wait()
        finally:
            serve.delete(NAME)
    finally:
        if own:
            serve.shutdown()
        ray.shutdown()
    return 0 if received == [signal.SIGTERM] else 128 + received[-1]


def _cpus(config: ReplicasConfig) -> int:
    replicas = sum(pool.scaling.max_replicas * pool.resources.num_cpus for pool in config.models)
    return math.ceil(replicas + config.ingress.replicas * config.ingress.num_cpus)
