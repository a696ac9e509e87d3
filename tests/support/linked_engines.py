"""A decode engine and a prefill engine in one thread, on shadow memory: the test decides when messages arrive."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import EngineConfig
from jaxinfer.config_disaggregation import DisaggregationConfig
from jaxinfer.engine.build import Engine
from jaxinfer.kv_transfer.connector import (
    Arrived,
    Asked,
    Blocks,
    Cancelled,
    Ended,
    Event,
    Job,
)
from jaxinfer.kv_transfer.messages import Ask
from jaxinfer.observability.snapshot import TransferStats
from jaxinfer.sampling_params import SamplingParams
from tests.support import engines
from tests.support.shadow_runner import ShadowModel, ShadowRunner, histories

PEER = b"decoder"
PROMPT = [i % 5 for i in range(23)]


@dataclass
class Link:
    """What both engines said, and is not delivered yet.

    Attributes:
        up: whether the prefill engine is there.
        fetches: numbers of those that the decode engine waits for; ``jobs`` those that the prefill engine works on.
        sent: pieces that the prefill engine sent.
    """

    up: bool = True
    to_prefill: deque[Event] = field(default_factory=deque)
    to_decode: deque[Event] = field(default_factory=deque)
    fetches: set[int] = field(default_factory=set)
    jobs: set[int] = field(default_factory=set)
    sent: list[Blocks] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    decoder: "DecodeEnd" = None  # type: ignore[assignment]
    prefiller: "PrefillEnd" = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.decoder, self.prefiller = DecodeEnd(self), PrefillEnd(self)

    @property
    def quiet(self) -> bool:
        return not (self.to_prefill or self.to_decode)

    def deliver(self, count: int | None = None) -> None:
        """Hands over the oldest messages of both directions."""
        for queue, end in ((self.to_prefill, self.prefiller), (self.to_decode, self.decoder)):
            for _ in range(len(queue) if count is None else min(count, len(queue))):
                end.take(queue.popleft())

    def fail(self, fetch: int, why: str = "late") -> None:
        """The decode engine gives up on a fetch; the other side gets to know later."""
        if fetch in self.fetches:
            self.fetches.remove(fetch)
            self.to_prefill.append(Cancelled(Job(PEER, fetch)))
            self.decoder.on_event(Ended(fetch, why))

    def lose_prefill(self) -> None:
        """The prefill engine is gone for the decode engine."""
        self.up = False
        self.to_prefill.clear()
        self.to_decode.clear()
        for fetch in list(self.fetches):
            self.fetches.remove(fetch)
            self.decoder.on_event(Ended(fetch, "the peer is lost"))

    def lose_decode(self) -> None:
        """The decode engine is gone for the prefill engine."""
        self.to_prefill.clear()
        for fetch in list(self.jobs):
            self.prefiller.take(Cancelled(Job(PEER, fetch)))


class DecodeEnd:
    def __init__(self, link: Link) -> None:
        self._link = link
        self.stats = TransferStats()

    @property
    def available(self) -> bool:
        return self._link.up

    def start(self, on_event) -> None:
        self.on_event = on_event

    def load(self, ask: Ask) -> None:
        assert ask.fetch not in self._link.fetches
        self._link.asks.append(ask)
        if self._link.up:
            self._link.fetches.add(ask.fetch)
            self._link.to_prefill.append(Asked(Job(PEER, ask.fetch), ask))
        else:
            self.on_event(Ended(ask.fetch, "no prefill engine answers"))

    def cancel(self, fetch: int) -> None:
        if fetch in self._link.fetches:
            self._link.fetches.remove(fetch)
            self._link.to_prefill.append(Cancelled(Job(PEER, fetch)))

    def take(self, event: Event) -> None:
        """Also passes on pieces of fetches that are over, as a real connector may."""
        if isinstance(event, Ended):
            if event.fetch not in self._link.fetches:
                return
            self._link.fetches.remove(event.fetch)
        self.on_event(event)

    def close(self) -> None: ...


class PrefillEnd:
    available = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self.stats = TransferStats()

    def start(self, on_event) -> None:
        self.on_event = on_event

    def save(self, job: Job, blocks: Blocks) -> None:
        if job.fetch in self._link.jobs:
            self._link.sent.append(blocks)
            self._link.to_decode.append(Arrived(job.fetch, blocks))

    def finished(self, job: Job, error: str | None) -> None:
        if job.fetch in self._link.jobs:
            self._link.jobs.remove(job.fetch)
            self._link.to_decode.append(Ended(job.fetch, error))

    def take(self, event: Event) -> None:
        if isinstance(event, Asked):
            self._link.jobs.add(event.job.fetch)
        elif isinstance(event, Cancelled):
            self._link.jobs.discard(event.job.fetch)
        self.on_event(event)

    def close(self) -> None: ...


class Pair:
    """Both engines around one shadow model.

    Args:
        settings: of the decode engine, and of the prefill engine if ``others`` are not given.
    """

    def __init__(
        self,
        settings: EngineConfig,
        model: ShadowModel,
        *,
        others: EngineConfig | None = None,
        windows: tuple[int | None, ...] = (None,),
        min_tokens: int = 4,
        max_fetches: int = 8,
        **options,
    ) -> None:
        self.link = Link()
        decode = DisaggregationConfig(
            role="decode", peers=("tcp://127.0.0.1:1",), min_tokens=min_tokens, max_fetches=max_fetches
        )
        prefill = DisaggregationConfig(role="prefill")
        self.decode = _engine(settings, decode, model, windows, self.link.decoder, options)
        self.prefill = _engine(others or settings, prefill, model, windows, self.link.prefiller, options)

    def check(self) -> None:
        self.decode.core.check_integrity()
        self.prefill.core.check_integrity()

    def settle(self, max_steps: int = 2000) -> list:
        """Runs both engines, and delivers, until nothing is left to do; the decode engine's news."""
        news = []
        for _ in range(max_steps):
            self.link.deliver()
            for engine in (self.prefill, self.decode):
                if engine.core.has_work:
                    deltas = engine.core.step()
                    news += deltas
            self.check()
            if self.idle:
                return news
        raise AssertionError(f"the engines did not come to rest within {max_steps} steps")

    @property
    def idle(self) -> bool:
        busy = self.decode.core.has_work or self.prefill.core.has_work
        return not busy and self.link.quiet

    def assert_clean(self) -> None:
        engines.assert_clean(self.decode)
        engines.assert_clean(self.prefill)
        assert not self.link.fetches
        assert not self.link.jobs


def _engine(settings, role, model, windows, connector, options) -> Engine:
    runners: list[ShadowRunner] = []

    def make(plan: CompilePlan) -> ShadowRunner:
        runners.append(ShadowRunner(model, plan, windows, settings.cache.num_blocks))
        return runners[0]

    engine = engines.build(
        make,
        settings.model_copy(update={"disaggregation": role}),
        windows=windows,
        connector=connector,
        **{"vocab": 8, "max_model_len": 64, "eos": (5,), **options},
    )
    runners[0].kv = engine.core.scheduler.kv
    return engine


def pair(
    windows: tuple[int | None, ...] = (None,),
    model: ShadowModel | None = None,
    *,
    max_fetches: int = 8,
    **options: Any,
) -> Pair:
    """Engines of small blocks and chunks; ``options`` are those of ``engines.config``."""
    values = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32, "chunk_size": 8, **options}
    return Pair(engines.config(**values), model or ShadowModel(), windows=windows, max_fetches=max_fetches)


def add(pair: Pair, name: str, prompt: list[int], **params: Any) -> list:
    """Gives the decode engine a request; its sequences."""
    values = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **params}
    sequences = pair.decode.inputs.process(name, engines.ids(prompt), SamplingParams(**values))
    pair.decode.core.add(sequences)
    return sequences


def tokens(news: list, name: str) -> list[int]:
    return [token for delta in news if delta.request_id == name for token in delta.token_ids]


def alone(prompt: list[int], count: int = 5) -> list[int]:
    """What follows a prompt that one engine computes."""
    return ShadowModel().greedy_tokens(histories(None, prompt)[-1], count)


def computed(engine: Engine) -> int:
    return engine.core.stats.computed_tokens


def trouble(rng: random.Random, link: Link) -> None:
    """Now and then something goes wrong between the engines."""
    dice = rng.random()
    if dice < 0.04 and link.fetches:
        link.fail(rng.choice(sorted(link.fetches)))
    elif dice < 0.06:
        link.lose_prefill()
    elif dice < 0.08:
        link.lose_decode()
    elif dice < 0.2:
        link.up = True
