"""How an engine hands blocks of K and V to other engines, and gets them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.observability.snapshot import TransferStats

Array = jax.Array | np.ndarray


@dataclass(frozen=True)
class Blocks:
    """Content of blocks ``start`` to ``stop`` of a sequence, in some layers of a KV group.

    Attributes:
        contents: K and V of each of these layers, ``[C, K, S, h]`` with whole logical heads.
        unused: slots at the end of the last block that hold nothing of the sequence, but anything.
    """

    group: int
    layers: tuple[int, ...]
    start: int
    stop: int
    contents: tuple[Array, ...]
    unused: int = 0


@dataclass(frozen=True)
class Job:
    """A prompt that this engine computes for another one.

    Attributes:
        peer: the engine that asked.
        fetch: its number of the fetch.
    """

    peer: bytes
    fetch: int


# ---- what happens elsewhere


@dataclass(frozen=True)
class Asked:
    """Another engine wants blocks."""

    job: Job
    ask: Ask


@dataclass(frozen=True)
class Cancelled:
    """The engine that asked does not wait any more, or is gone."""

    job: Job


@dataclass(frozen=True)
class Arrived:
    """Blocks of a fetch are here."""

    fetch: int
    blocks: Blocks


@dataclass(frozen=True)
class Ended:
    """A fetch is over: all blocks came and are sound, or ``error`` says why not."""

    fetch: int
    error: str | None = None


Event = Asked | Cancelled | Arrived | Ended


class KVConnector(Protocol):
    """Moves blocks between engines, request by request and layer by layer.

    All methods but ``drain`` are called on the thread of the step loop, and none of them waits: content that is
    still being computed is waited for elsewhere, and what happens elsewhere comes as events. Pieces of a fetch that
    is over may still come.
    """

    @property
    def stats(self) -> TransferStats: ...

    @property
    def available(self) -> bool:
        """Whether some engine would take a fetch now."""
        ...

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Connects; events come from then on, on any thread.

        Raises:
            ConfigError: an engine on the other side does not fit, or an address cannot be used.
        """
        ...

    def load(self, ask: Ask) -> None:
        """Asks some engine for blocks. ``Arrived`` for all pieces, and one ``Ended``, follow, within the timeout."""
        ...

    def cancel(self, fetch: int) -> None:
        """What a fetch would bring is of no use; no event of it is wanted."""
        ...

    def save(self, job: Job, blocks: Blocks) -> None:
        """Sends blocks, whose content may still be computed, to the engine that asked."""
        ...

    def finished(self, job: Job, error: str | None) -> None:
        """Ends a job behind all that was saved for it: its blocks are sound, or ``error`` says why not."""
        ...

    def drain(self) -> Future[None]:
        """Refuses prompts of other engines from now on; done when those that were taken are over, and their blocks were
        taken. On any thread."""
        ...

    def close(self) -> None:
        """Ends threads and connections. Does not wait for what is on its way."""
        ...


def check_blocks(blocks: Blocks, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
    """Raises:
    ValueError: contents have other shapes or another dtype than blocks of this engine.
    """
    found = [tuple(x.shape) for x in blocks.contents]
    if found != list(shapes) or any(x.dtype != dtype for x in blocks.contents):
        raise ValueError(
            f"blocks of shapes {found} and dtypes {[str(x.dtype) for x in blocks.contents]} came, but those of this "
            f"engine are {list(shapes)} of {dtype}"
        )


def drained() -> Future[None]:
    """What ``drain`` gives where no prompts of other engines are computed."""
    done: Future[None] = Future()
    done.set_result(None)
    return done
