"""Connectors of both roles in one process."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from jaxinfer.config_disaggregation import DisaggregationConfig
from jaxinfer.kv_transfer.connector import Event
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.kv_transfer.zmq_connector import ZmqConnector

LAYOUT = BlockLayout((2, 2, 1), ((4, 4), (4, 4), (8, 2)), (0, 1, 0), (None, 8), 4, "float32")
DIGEST = b"d" * 16


class Engine:
    """A started connector and its events."""

    def __init__(self, role: str, layout: BlockLayout = LAYOUT, print_: str = "f", **options) -> None:
        values = {"heartbeat": 0.2, "timeout": 20.0, "connect_timeout": 20.0, "bind": "tcp://127.0.0.1:0"}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        config = DisaggregationConfig(role=role, **{**values, **options})
        self.connector = ZmqConnector(config, layout, f"model-{role}", print_)

    def start(self) -> None:
        self.connector.start(self.events.put)

    def next(self, timeout: float = 20.0) -> Event:
        return self.events.get(timeout=timeout)


@contextmanager
def connected(prefill: dict | None = None, **options) -> Iterator[tuple[Engine, Engine]]:
    there = Engine("prefill", **(prefill or {}))
    there.start()
    assert there.connector.server is not None
    here = Engine("decode", peers=(there.connector.server.address,), **options)
    try:
        here.start()
        yield here, there
    finally:
        here.connector.close()
        there.connector.close()


def ask(fetch: int = 1, first=(0, 1), blocks: int = 3) -> Ask:
    return Ask(fetch, tuple(range(blocks * 4)), first, DIGEST, 0, None)


def content(layers, count: int, dtype=np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(count)
    return tuple(
        rng.standard_normal(dims).astype(dtype) for layer in layers for dims in LAYOUT.shapes(layer, count)
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
