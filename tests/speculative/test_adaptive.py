"""Adaptive speculation: the costs and rates it learns, and that it never costs throughput, in simulated time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine import core
from jaxinfer.observability.snapshot import StepRecord
from jaxinfer.request import Request
from jaxinfer.request import Sequence as Seq
from jaxinfer.runner import simulated
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.timing import ProgramSeconds
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.speculative import speculation
from jaxinfer.speculative.acceptance import START, Acceptance
from jaxinfer.speculative.adaptive import AdaptiveDrafts
from jaxinfer.speculative.costs import StepCosts
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.evidence import NOTHING, class_of
from jaxinfer.speculative.speculation import Speculation
from tests.support import engines
from tests.support.engines import Driver, Job, ids, token_params
from tests.support.tiny_models import prompt_ids, tiny_model, tiny_settings

pytestmark = pytest.mark.feature("adaptive drafts")

PROGRAMS = ProgramSeconds({1: 1.0, 8: 2.0, 16: 3.0}, {1: 0.1, 8: 0.2, 16: 0.3})


def record(tokens: int, device: float, host: float = 0.25, prefill: int = 0, **more: float) -> StepRecord:
    return StepRecord(0, 0.0, host, device, prefill, tokens, 0, tokens, 0, **more)  # type: ignore[arg-type]


def seconds(costs: StepCosts, tokens: int, rows: int | None = None) -> float:
    return float(costs.device_seconds(np.array(tokens), np.array(tokens if rows is None else rows)))


def test_costs_start_as_measured_and_follow_what_runs():
    costs = StepCosts(PROGRAMS, True, 4)
    assert [seconds(costs, n) for n in (1, 2, 8, 9, 99)] == pytest.approx([1.1, 2.2, 2.2, 3.3, 3.3])
    assert seconds(costs, 8, 1) == pytest.approx(2.1)
    assert costs.host_seconds == 0
    costs.observe(record(6, 4.4))  # twice of what was measured
    assert [seconds(costs, n) for n in (1, 8, 9)] == pytest.approx([2.2, 4.4, 6.6])
    assert costs.host_seconds == 0.25
    costs.observe(record(8, 400.0))  # an outlier
    costs.observe(record(8, 4.4, prefill=3))
    for _ in range(3):
        costs.observe(record(8, 4.6))
    assert seconds(costs, 8) == pytest.approx(4.6)
    assert costs.room(3) == 5
    assert costs.room(8) == 0


def test_a_device_that_was_not_measured_is_learned():
    plan = CompilePlan.make(engines.config().scheduler, 64, 4, 1, draft_limits=(4, 8))
    costs = StepCosts(ProgramSeconds.guessed(plan), True, 4)
    costs.observe(record(1, 0.01))
    costs.observe(record(4, 0.03))
    assert seconds(costs, 1) == pytest.approx(0.01)
    assert seconds(costs, 4) == pytest.approx(0.03)
    assert 0.01 <= seconds(costs, 2) <= 0.03


def sequence() -> Seq:
    return Seq(Request("r", None, (1,), SamplingParams()), 0, 0, 100, (0, 0))


def test_rates_are_those_of_a_sequence_and_of_all_where_it_is_new():
    acceptance = Acceptance(4)
    good, bad, new = sequence(), sequence(), sequence()
    assert acceptance.rates([new], [NOTHING]).accepted_RK[0, 0] == START[NOTHING]
    for _ in range(200):
        acceptance.asked(good, NOTHING, 4, 3)
        acceptance.verified(good, NOTHING, 3, 3)
        acceptance.asked(bad, NOTHING, 4, 4)
        acceptance.verified(bad, NOTHING, 4, 0)
    offered_RK, accepted_RK = acceptance.rates([good, bad, new], [NOTHING] * 3)
    assert (np.diff(accepted_RK) <= 0).all()
    assert (np.diff(offered_RK) <= 0).all()
    assert accepted_RK[0, 2] > 0.8
    assert accepted_RK[1, 0] < 0.15
    assert 0.4 < accepted_RK[2, 0] < 0.6
    assert offered_RK[0, 2] > 0.9
    assert offered_RK[0, 3] < 0.2 < offered_RK[1, 3]
    for seq in (good, bad, new, *(sequence() for _ in range(40))):
        acceptance.rates([seq], [NOTHING])
        acceptance.forget(seq)
    assert len(acceptance) == 0


def test_long_matches_are_trusted_whatever_became_of_short_ones():
    acceptance = Acceptance(4)
    short, long = class_of(1), class_of(20)
    for _ in range(50):
        seq = sequence()
        acceptance.verified(seq, short, 4, 0)
    new = sequence()
    rates_R = acceptance.rates([new, new], [short, long]).accepted_RK[:, 0]
    assert rates_R[0] < 0.1
    assert rates_R[1] == START[long]
    acceptance.verified(new, long, 4, 0)
    acceptance.verified(new, long, 4, 0)
    assert acceptance.rates([new], [long]).accepted_RK[0, 0] < 0.6 * START[long]


@dataclass
class Clock:
    """Stands for the module ``time``: waiting passes at once, and each look at the clock takes the host a moment."""

    now: float = 0.0
    moment: float = 0.0

    def monotonic(self) -> float:
        self.now += self.moment
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, span: float) -> None:
        self.now += span


@dataclass(frozen=True)
class Bucketed:
    """A step costs what its token bucket costs.

    Attributes:
        steps: of rows that decode: output tokens before the step, and drafts.
    """

    plan: CompilePlan
    cost: Callable[[int], float]
    steps: list[tuple[int, int]]

    def seconds(self, plan: StepPlan) -> float:
        for row in plan.rows:
            drafts = len(row.drafts)
            before = row.start + row.num_tokens - drafts - row.seq.num_prompt
            if before > 0:
                self.steps.append((before, drafts))
        return self.cost(self.plan.tokens(plan.num_tokens))


class Drafts:
    """Knows what comes, and gets a share of it wrong, at random.

    Args:
        found: whether a look-up finds something behind so many tokens.
    """

    def __init__(
        self,
        outputs: dict[tuple[int, ...], Sequence[int]],
        right: Callable[[int], float],
        make: Callable[[int], None],
        found: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._outputs, self._right, self._make, self._found = outputs, right, make, found
        self._rng = np.random.default_rng(0)

    def evidence(self, seq: Seq) -> int:
        """Like that of a look-up, three tokens long."""
        return class_of(3 * self._found(len(seq.output_token_ids)))

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        self._make(max(job.limit for job in jobs))
        return [self._drafts(job) for job in jobs]

    def forget(self, seq: Seq) -> None:
        pass

    def _drafts(self, job: DraftJob) -> tuple[int, ...]:
        done = len(job.seq.output_token_ids)
        if not self._found(done):
            return ()
        coming = self._outputs[job.seq.request.prompt_token_ids][done : done + job.limit]
        right = self._rng.random(len(coming)) < self._right(done)
        return tuple(token if ok else 1 for token, ok in zip(coming, right))


FLAT = {"memory bound": lambda t: 0.010 + 0.00002 * t}
COSTS = {
    **FLAT,
    "in between": lambda t: 0.010 + 0.0003 * t,
    "compute bound": lambda t: 0.002 + 0.001 * t,
}
SPECULATIVE = SpeculativeConfig(drafter="ngram", adaptive=True)


@dataclass(frozen=True)
class Run:
    rate: float
    tokens: dict[tuple[int, ...], list[int]]
    drafted: int
    steps: list[tuple[int, int]]


def simulate(
    monkeypatch,
    cost,
    batch: int,
    right=None,
    outputs=None,
    measured=True,
    length=120,
    making=0.0,
    found=None,
    fixed=None,
) -> Run:
    """Tokens per second of so many requests together; ``right`` is the share of right drafts by position, None is
    without speculation. ``making`` is what a draft takes to be made, those of different sequences together. ``found``
    says at which positions a look-up has drafts; None: it is no look-up. ``fixed`` drafts, or an adaptive number."""
    clock = Clock(moment=0.0002)
    monkeypatch.setattr(core, "time", clock)
    monkeypatch.setattr(simulated, "time", clock)
    monkeypatch.setattr(speculation, "time", clock)
    steps: list[tuple[int, int]] = []
    settings = engines.config(
        max_num_seqs=batch,
        max_num_batched_tokens=256,
        num_blocks=max(40, length // 3) * batch + 1,
        speculative=SPECULATIVE if right else None,
    )
    engine = engines.build(
        lambda plan: simulated.SimulatedRunner(engines.VOCAB, Bucketed(plan, cost, steps)),
        settings,
        max_model_len=max(160, length + 40),
    )
    if right is not None:
        programs = ProgramSeconds.guessed(engine.plan)
        if measured:
            programs = ProgramSeconds({t: cost(t) for t in engine.plan.token_buckets}, programs.sampling)
        adaptive = AdaptiveDrafts(
            StepCosts(programs, True, SPECULATIVE.max_drafts), *SPECULATIVE.draft_limits
        )
        drafter = Drafts(outputs, right, lambda depth: clock.sleep(making * depth), found or (lambda _: True))
        engine.core.speculation = Speculation(
            drafter,
            fixed or SPECULATIVE.max_drafts,
            SPECULATIVE.max_step_drafts,
            None if fixed else adaptive,
            evidence=drafter.evidence if found else None,
        )
    driver = Driver(engine, check=False)
    prompts = [(1 + i, 2, 3) for i in range(batch)]
    for i, prompt in enumerate(prompts):
        driver.add(
            str(i), ids(prompt), token_params(max_tokens=length, seed=i, temperature=1.0, ignore_eos=True)
        )
    driver.drain()
    tokens = {prompt: driver.tokens(str(i)) for i, prompt in enumerate(prompts)}
    assert sum(map(len, tokens.values())) == batch * length
    return Run(batch * length / clock.now, tokens, engine.core.stats.drafted_tokens, steps)


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "unmeasured"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cost", COSTS)
def test_at_batch_32_throughput_is_never_below_097_of_speculation_off(monkeypatch, cost, share, measured):
    plain = simulate(monkeypatch, COSTS[cost], 32)
    fast = simulate(monkeypatch, COSTS[cost], 32, lambda _: share, plain.tokens, measured)
    assert fast.tokens == plain.tokens
    # A device that was not measured is explored by steps that may turn out too dear.
    assert fast.rate >= (0.97 if measured else 0.95) * plain.rate
    if cost == "memory bound" and share == 1:
        assert fast.rate > (2 if measured else 1.3) * plain.rate


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("share", "gain"), [(0.0, 0.97), (0.5, 1.2), (1.0, 3.0)])
def test_one_request_gains_what_there_is_to_gain(monkeypatch, cost, share, gain):
    plain = simulate(monkeypatch, COSTS[cost], 1)
    fast = simulate(monkeypatch, COSTS[cost], 1, lambda _: share, plain.tokens)
    assert fast.rate >= (gain if cost == "memory bound" else 0.97) * plain.rate


def repeats(at: int) -> bool:
    """Text that repeats something for 30 of 50 tokens."""
    return at % 50 >= 20


def test_a_request_alone_gets_drafts_as_soon_as_a_look_up_finds_something(monkeypatch):
    """Steps cost what they cost whatever they hold, and 60 % of what was looked up is right."""
    cost = COSTS["memory bound"]
    plain = simulate(monkeypatch, cost, 1, length=300)
    fixed = [
        simulate(monkeypatch, cost, 1, lambda _: 0.6, plain.tokens, length=300, found=repeats, fixed=n)
        for n in range(1, SPECULATIVE.max_drafts + 1)
    ]
    fast = simulate(monkeypatch, cost, 1, lambda _: 0.6, plain.tokens, length=300, found=repeats)
    drafts = [count > 0 for before, count in fast.steps if repeats(before)]
    assert np.mean(drafts) > 0.8
    assert fast.rate >= 0.95 * max(run.rate for run in fixed)
    assert fast.rate > 1.2 * plain.rate


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_matches_that_are_never_right_cost_little(monkeypatch, cost, batch):
    plain = simulate(monkeypatch, COSTS[cost], batch)
    fast = simulate(monkeypatch, COSTS[cost], batch, lambda _: 0.02, plain.tokens, found=repeats)
    assert fast.rate > 0.97 * plain.rate


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_at_batch_32_matches_are_left_alone_where_each_row_costs(monkeypatch, share):
    plain = simulate(monkeypatch, COSTS["compute bound"], 32)
    fast = simulate(monkeypatch, COSTS["compute bound"], 32, lambda _: share, plain.tokens, found=repeats)
    assert fast.rate >= 0.97 * plain.rate


def test_drafts_come_back_when_they_are_right_again(monkeypatch):
    """Wrong for 60 tokens of each sequence, right from then on."""
    plain = simulate(monkeypatch, COSTS["memory bound"], 4)
    always = simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 1.0, plain.tokens)
    later = simulate(monkeypatch, COSTS["memory bound"], 4, lambda at: float(at >= 60), plain.tokens)
    never = simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 0.0, plain.tokens)
    assert never.rate < 1.3 * never.rate < later.rate < always.rate
    assert never.drafted < 0.5 * later.drafted


def test_drafts_that_take_long_to_make_are_not_asked_for(monkeypatch):
    """Half of the drafts are right and verifying them is cheap, but a draft takes half a step to be made."""
    plain = simulate(monkeypatch, COSTS["memory bound"], 4)
    cheap = simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 0.5, plain.tokens)
    dear = simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 0.5, plain.tokens, making=0.005)
    assert cheap.rate > 1.2 * plain.rate
    assert dear.rate > 0.97 * plain.rate


def test_what_is_lost_is_bounded_even_if_estimates_promise_too_much(monkeypatch):
    """Drafts are believed to be right half the time, whatever happens."""
    monkeypatch.setattr(Acceptance, "verified", lambda *_: None)
    plain = simulate(monkeypatch, COSTS["memory bound"], 4, length=150)
    fast = simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 0.0, plain.tokens, length=150)
    assert 0.97 * plain.rate < fast.rate < plain.rate


def test_drafts_in_flight_do_not_make_the_next_step_smaller(monkeypatch):
    """The next step of a sequence has a token, whatever comes of the drafts that are verified."""
    asked = []
    worth = AdaptiveDrafts.worth

    def noted(self, candidates, tokens, rows):
        asked.append((len(candidates), tokens, rows))
        return worth(self, candidates, tokens, rows)

    monkeypatch.setattr(AdaptiveDrafts, "worth", noted)
    plain = simulate(monkeypatch, COSTS["memory bound"], 4, length=20)
    simulate(monkeypatch, COSTS["memory bound"], 4, lambda _: 1.0, plain.tokens, length=20)
    assert all(tokens == rows for sequences, tokens, rows in asked if sequences == 4)


@pytest.mark.slow
def test_programs_are_timed_and_an_adaptive_engine_gives_the_same_tokens():
    model = tiny_model()
    settings = tiny_settings(
        speculative=SpeculativeConfig(
            drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1, adaptive=True
        )
    )
    prompt, params = prompt_ids(9) * 2, token_params(max_tokens=20)
    engine = model.engine(settings)
    plan, runner = engine.plan, engine.runner
    assert isinstance(runner, JaxRunner)
    programs = runner.time_programs(BatchBuilder(plan), 8)
    assert set(programs.layers) == {t for t in plan.token_buckets if t <= 8}
    assert set(programs.sampling) == set(plan.row_buckets)
    assert min(*programs.layers.values(), *programs.sampling.values()) > 0
    (plain,) = engines.run(model.engine(tiny_settings()), [Job(ids(prompt), params)])
    (fast,) = engines.run(engine, [Job(ids(prompt), params)])
    assert fast.outputs[0].token_ids == plain.outputs[0].token_ids
