"""What the dashboard's data is made of: rolling percentiles, the history of samples, the map of the block pool."""

import asyncio
import time

import numpy as np
import pytest

from jaxinfer.engine.client import EngineDeadError, EngineDrainingError, EngineRequest
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.observability.snapshot import EngineSnapshot
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import SamplingParams
from serve.dashboard.history import KEPT_SAMPLES, History
from serve.dashboard.latency import LatencyWindow, RollingHistogram
from serve.dashboard.page import load_page
from serve.dashboard.source import MAX_CELLS, DashboardSource, block_map
from serve.observers import Call
from tests.support.engines import config, simulated

pytestmark = pytest.mark.feature("dashboard")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeClient:
    """What the source needs of an engine client."""

    def __init__(self) -> None:
        engine = simulated(config(num_blocks=9))
        self.config, self.limits = engine.config, engine.limits
        self.tokenizer, self.chat_template = engine.tokenizer, engine.chat_template
        self.newest = EngineSnapshot(num_blocks=8)
        self.owners: tuple[int, ...] = (0, 0, 1, 2, 2, 3, 0, 0)
        self.owner_calls = 0
        self.dead = self.draining = False

    def snapshot(self) -> EngineSnapshot:
        return self.newest

    async def block_owners(self) -> tuple[int, ...]:
        self.owner_calls += 1
        if self.dead:
            raise EngineDeadError("gone")
        return self.owners

    def check_ready(self) -> None:
        if self.dead:
            raise EngineDeadError("gone")
        if self.draining:
            raise EngineDrainingError("the server stops")


# ---- percentiles


@pytest.mark.parametrize("scale", [0.002, 0.05, 3.0])
def test_percentiles_are_within_the_width_of_a_bucket(scale):
    values = np.random.default_rng(0).lognormal(np.log(scale), 0.5, 5000)
    histogram = RollingHistogram(30)
    for value in values:
        histogram.add(float(value), 7.0)
    for got, rank in zip(histogram.percentiles(7.5, 0.5, 0.95, 1.0), (0.5, 0.95, 1.0)):
        assert got == pytest.approx(float(np.quantile(values, rank)), rel=0.05)


def test_values_are_forgotten_and_out_of_range_ones_kept_at_the_ends():
    histogram = RollingHistogram(10)
    assert histogram.percentiles(100.0, 0.5) == (None,)
    histogram.add(0.0, 100.0)
    histogram.add(1e9, 100.9)
    low, high = histogram.percentiles(101.0, 0.1, 0.9)
    assert low < 2e-4
    assert high > 3600
    histogram.add(1.0, 105.0)
    assert histogram.percentiles(111.0, 0.0, 0.5, 1.0) == (pytest.approx(1.0, rel=0.03),) * 3
    assert histogram.percentiles(116.0, 0.5, 0.9) == (None, None)


def test_latencies_of_a_call_are_measured_per_choice():
    clock = Clock()
    window = LatencyWindow(30, clock)
    request = EngineRequest("a", (1, 2), SamplingParams(n=2))
    call = window.started(Call("c", "chat", "m", (request,), True, received=clock.now))
    clock.now += 0.2
    call.news([OutputDelta("a", 0, (5,)), OutputDelta("a", 1, (5,))])
    assert window.itl.percentiles(clock.now, 0.5) == (None,)
    clock.now += 0.05
    call.news([OutputDelta("a", 0, (5, 6))])
    clock.now += 0.75
    call.news([OutputDelta("a", 0, (), finish_reason=FinishReason.STOP), OutputDelta("a", 1, (6,))])
    call.ended()
    assert window.ttft.percentiles(clock.now, 0.0, 1.0) == pytest.approx((0.2, 0.2), rel=0.03)
    assert window.itl.percentiles(clock.now, 0.5, 1.0) == pytest.approx((0.05, 0.8), rel=0.03)
    assert window.e2e.percentiles(clock.now, 0.5) == (pytest.approx(1.0, rel=0.03),)


# ---- history


def test_samples_hold_rates_of_the_last_second_and_hits_of_the_last_minute():
    clock = Clock()
    client = FakeClient()
    history = History(client.snapshot, LatencyWindow(30, clock), clock)
    history.sample()
    for second in range(1, 71):
        clock.now += 1
        queried = 100 if second <= 30 else 130
        client.newest = EngineSnapshot(
            num_blocks=8,
            used_blocks=2,
            running=3,
            waiting=1,
            generated_tokens=50 * second,
            prompt_tokens=10 * second,
            prefix_query_tokens=queried,
            prefix_hit_tokens=queried // 2,
        )
        history.sample()
    samples = history.since(0)
    assert [s.number for s in samples] == list(range(71))
    assert (samples[0].output_rate, samples[0].hit_rate) == (0, None)
    last = samples[-1]
    assert (last.output_rate, last.prompt_rate) == (pytest.approx(50), pytest.approx(10))
    assert (last.running, last.waiting, last.kv_usage) == (3, 1, 0.25)
    assert last.hit_rate == pytest.approx(0.5)
    assert last.ttft_p50 is None
    clock.now += 25
    history.sample()
    assert history.since(0)[-1].output_rate == 0


def test_history_is_bounded_and_pages_get_what_they_lack():
    clock = Clock()
    history = History(EngineSnapshot, LatencyWindow(30, clock), clock)
    for _ in range(KEPT_SAMPLES + 50):
        clock.now += 1
        history.sample()
    assert len(history.since(0)) == KEPT_SAMPLES
    assert [s.number for s in history.since(KEPT_SAMPLES + 48)] == [KEPT_SAMPLES + 48, KEPT_SAMPLES + 49]
    assert history.since(KEPT_SAMPLES + 50) == []
    assert history.since(10**9) == []


# ---- state


def test_small_pools_have_one_cell_per_block_and_large_ones_few():
    small = block_map((0, 1, 2, 3, 3))
    assert (small.cells, small.per_cell, small.counts) == ("01233", 1, (1, 1, 1, 2))
    owners = (2,) * 3 * MAX_CELLS + (0, 0, 1, 1)
    large = block_map(owners)
    assert large.per_cell == 4
    assert large.cells == "2" * (3 * MAX_CELLS // 4) + "0"
    assert large.counts == (2, 2, 3 * MAX_CELLS, 0)
    assert block_map(()).cells == ""


def test_the_pool_map_is_asked_for_once_a_second_and_outlives_the_engine():
    client, clock = FakeClient(), Clock()
    history = History(client.snapshot, LatencyWindow(30, clock), clock)
    source = DashboardSource(client, history, "m", int(time.time()) - 60, clock)

    async def scenario() -> None:
        first = await source.state(0)
        assert (first.blocks.cells, first.error) == ("00122300", None)
        assert first.uptime == pytest.approx(60, abs=2)
        client.owners = (0,) * 8
        assert (await source.state(0)).blocks.cells == "00122300"
        assert client.owner_calls == 1
        clock.now += 1
        assert (await source.state(0)).blocks.cells == "0" * 8
        clock.now += 1
        client.draining = True
        drained = await source.state(0)
        assert (drained.error, drained.draining) == (None, True)
        client.dead = True
        dead = await source.state(0)
        assert (dead.blocks.cells, dead.error) == ("0" * 8, "gone")

    asyncio.run(scenario())


# ---- page


def test_the_page_is_one_document_that_refuses_everything_from_outside():
    page = load_page()
    assert "<style>" in page.html
    for outside in ("src=", "http://", "https://", "@import", "url(", "innerHTML", "eval("):
        assert outside not in page.html
    assert 'href="data:,"' in page.html
    assert page.html.count("href=") == 1
    assert "default-src 'none'" in page.policy
    assert "unsafe" not in page.policy
