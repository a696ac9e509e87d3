"""``jaxinfer serve`` on a rank other than 0: it serves nobody, and computes what rank 0 dispatches."""

import gc
import logging
import signal
from types import FrameType
from typing import NoReturn

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.config import EngineConfig
from jaxinfer.hosts.link import end_process

logger = logging.getLogger(__name__)


def follow(config: EngineConfig) -> NoReturn:
    """Follows until rank 0 ends, and ends the process: with status 0 if the work is done, 2 if model or configuration
    are wrong, else 1."""
    # Imported here, as a process that is wrongly configured should say so before it loads JAX.
    from jaxinfer.engine.build import build_engine
    from jaxinfer.hosts.gang import leave

    rank, count = config.hosts.rank, config.hosts.count
    try:
        engine = build_engine(config)
    except (CheckpointError, ValueError) as error:  # ValueError: as the command line takes it
        logger.error("rank %s of %s: %s", rank, count, error)
        leave(2)
    except Exception:
        logger.exception("rank %s of %s could not be started", rank, count)
        leave(1)
    # Until now a signal has ended this process, and thereby the start of all.
    _leave_signals_to_rank_0(config)
    gc.collect()
    gc.freeze()
    logger.warning("rank %s of %s follows %s", rank, count, config.hosts.channel)
    try:
        engine.gang.follow(engine.runner, engine.plan)
    except Exception as error:
        logger.exception("rank %s of %s failed", rank, count)
        engine.gang.part(f"{type(error).__name__}: {error}")
        leave(1)
    engine.gang.part(None)
    leave(0)


def _leave_signals_to_rank_0(config: EngineConfig) -> None:
    """Whoever stops a service signals all its processes. Rank 0 still finishes its requests, and needs the others; a
    second signal ends this process at once."""
    seen: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if seen:
            end_process(128 + signum)
        seen.append(signum)
        logger.warning("rank %s works until rank 0 ends; a second signal ends it at once", config.hosts.rank)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
