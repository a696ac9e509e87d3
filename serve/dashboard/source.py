"""What ``GET /dashboard/data`` answers: the newest snapshot, the history since the page's last call, fixed facts."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.client import EngineClient, EngineDeadError, EngineDrainingError
from jaxinfer.observability.snapshot import EngineSnapshot, StepRecord
from serve.context import package_version
from serve.dashboard.history import History, Sample

MAX_CELLS = 4096
"""Cells of the block map; a larger pool shows several blocks per cell."""
MAX_STEPS = 240
BLOCKS_INTERVAL = 0.9
"""Seconds; a little less than between two polls of a page."""
BLOCKS_TIMEOUT = 0.5


class Facts(msgspec.Struct, frozen=True):
    """What does not change while the server runs."""

    version: str
    model: str
    engine: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chat: bool


class Blocks(msgspec.Struct, frozen=True):
    """The pool map.

    Attributes:
        cells: one digit per cell: 0 free, 1 cached, 2 held by one sequence, 3 shared; the most common owner of its
            ``per_cell`` blocks.
        counts: blocks by owner.
    """

    cells: str
    per_cell: int
    counts: tuple[int, int, int, int]


class State(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        boot: differs between runs of the server: a page that sees it change forgets what it holds.
        now: seconds, ``time.monotonic``; the clock of samples and steps.
        error: why the engine is dead; None while it lives.
        draining: no new requests are taken, because the server is to stop.
        totals: counters since start.
        sample_fields, step_fields: names of the columns of ``samples`` and ``steps``, oldest row first.
    """

    boot: str
    now: float
    uptime: float
    error: str | None
    draining: bool
    facts: Facts
    totals: dict[str, int]
    finished: dict[str, int]
    sample_fields: tuple[str, ...]
    samples: list[Sample]
    step_fields: tuple[str, ...]
    steps: list[tuple[float, ...]]
    blocks: Blocks


class DashboardSource:
    """Answers pages.

    Args:
        started: unix time.
    """

    def __init__(
        self,
        client: EngineClient,
        history: History,
        model: str,
        started: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._history = history
        self._started = started
        self._clock = clock
        self._facts = _facts(client, model)
        self._boot = uuid.uuid4().hex
        self._blocks = block_map(())
        self._blocks_time = -BLOCKS_INTERVAL

    async def state(self, since: int) -> State:
        """The state, with the samples from number ``since`` on."""
        await self._refresh_blocks()
        error, draining = self._condition()
        snapshot, now = self._client.snapshot(), self._clock()
        return State(
            boot=self._boot,
            now=now,
            uptime=max(time.time() - self._started, 0.0),
            error=error,
            draining=draining,
            facts=self._facts,
            totals=_totals(snapshot),
            finished=snapshot.requests_finished,
            sample_fields=Sample._fields,
            samples=self._history.since(since),
            step_fields=STEP_FIELDS,
            steps=[_step_row(step) for step in snapshot.steps[-MAX_STEPS:]],
            blocks=self._blocks,
        )

    async def _refresh_blocks(self) -> None:
        """Asks for the pool map, at most once a second for all pages: the engine makes it between two steps. While a
        step takes long, or when the engine is dead, the last map stays."""
        now = self._clock()
        if now - self._blocks_time < BLOCKS_INTERVAL:
            return
        self._blocks_time = now
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(BLOCKS_TIMEOUT):
                self._blocks = block_map(await self._client.block_owners())

    def _condition(self) -> tuple[str | None, bool]:
        """Why the engine is dead, and whether it drains."""
        try:
            self._client.check_ready()
        except EngineDrainingError:
            return None, True
        except EngineDeadError as error:
            return str(error) or "the engine is dead", False
        return None, False


STEP_FIELDS = (
    "index",
    "start",
    "host",
    "device",
    "prefill",
    "decode",
    "padding",
    "sequences",
    "preempted",
)


def _step_row(step: StepRecord) -> tuple[float, ...]:
    return (
        step.index,
        step.start,
        step.host_seconds,
        step.device_seconds,
        step.prefill_tokens,
        step.decode_tokens,
        step.padded_tokens,
        step.sequences,
        step.preempted,
    )


def _totals(snapshot: EngineSnapshot) -> dict[str, int]:
    return {
        "requests": snapshot.requests_admitted,
        "rejected": snapshot.admission_rejections,
        "prompt_tokens": snapshot.prompt_tokens,
        "generated_tokens": snapshot.generated_tokens,
        "steps": snapshot.steps_total,
        "preemptions": snapshot.preemptions,
        "compilations": snapshot.compilations,
        "waiting_tokens": snapshot.waiting_tokens,
    }


def block_map(owners: Sequence[int]) -> Blocks:
    """Owners per block as a map of at most ``MAX_CELLS`` cells."""
    if not owners:
        return Blocks("", 1, (0, 0, 0, 0))
    owner_N = np.asarray(owners, np.int8)
    counts = np.bincount(owner_N, minlength=4)
    per_cell = -(-len(owner_N) // MAX_CELLS)
    if per_cell > 1:
        edges = [*range(0, len(owner_N), per_cell), len(owner_N)]
        owner_N = np.array(
            [np.bincount(owner_N[a:b], minlength=4).argmax() for a, b in pairwise(edges)], np.int8
        )
    cells = (owner_N + ord("0")).astype(np.uint8).tobytes().decode("ascii")
    return Blocks(cells, per_cell, (int(counts[0]), int(counts[1]), int(counts[2]), int(counts[3])))


def _facts(client: EngineClient, model: str) -> Facts:
    config: EngineConfig = client.config
    return Facts(
        version=package_version(),
        model=model,
        engine=config.server.engine,
        block_size=client.limits.block_size,
        num_blocks=client.limits.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=client.limits.max_model_len,
        chat=client.tokenizer is not None and bool(client.chat_template.sources),
    )
