"""SCH-07: abort in every state ends in one clean-up and one terminal event."""

import pytest

from tests.support.engines import Driver, assert_clean, config, context_script, ids, token_params
from tests.support.ledger import ledgered

pytestmark = pytest.mark.feature("abort", "chunked prefill")

PROMPT = list(range(100, 116))
ROUNDS = {0: 10, 1: 50}
LONG = token_params(max_tokens=40, ignore_eos=True)


def target(**values):
    return token_params(**{"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 1, **values})


# Steps before the abort, for a prompt of 16 in chunks of 4. With overlap, step k dispatches chunk k and commits chunk
# k - 1.
STATES: dict[str, int] = {
    "before the first step": 0,
    "chunk 1 in flight": 1,
    "chunk 2 in flight": 2,
    "last chunk in flight": 4,
    "after token 1": 5,
    "finishing token in flight": 6,
    "after the finish": 8,
}


class Others:
    """Two requests that always run, more than half of the pool between them; their answers never change."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._running = ["", ""]
        self._count = 0
        self.outputs: list[set[tuple[int, ...]]] = [set(), set()]
        self.keep_running()
        driver.step(6)

    def keep_running(self) -> None:
        for i, name in enumerate(self._running):
            if not name or self.driver.finishes(name):
                self.note()
                self._running[i] = f"other{self._count}"
                self._count += 1
                self.driver.add(self._running[i], ids(range(10 * i, 10 * i + 20)), LONG)

    def note(self) -> None:
        for i, name in enumerate(self._running):
            if name and self.driver.finishes(name):
                assert self.driver.finishes(name) == ["length"]
                self.outputs[i].add(tuple(self.driver.tokens(name)))

    def drain(self) -> None:
        self.driver.drain()
        self.note()
        assert [len(answers) for answers in self.outputs] == [1, 1], "an answer of another request changed"


def harness(overlap: int = 1, **settings) -> Others:
    values = {"chunk_size": 4, "num_blocks": 40, "overlap": overlap, **settings}
    engine, _ = ledgered(config(**values), script=context_script())
    return Others(Driver(engine))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_sch_07_abort_in_any_state(state, overlap):
    others = harness(overlap)
    driver, core = others.driver, others.driver.engine.core
    for round_ in range(ROUNDS[overlap]):
        others.keep_running()
        name = f"r{round_}"
        driver.add(name, ids(PROMPT), target())
        driver.step(STATES[state])
        ended = "length" if driver.finishes(name) else "abort"
        driver.abort(name)
        driver.abort(name)
        assert all(s.request.request_id != name for s in core.scheduler.live_sequences())
        driver.step(2)
        assert driver.finishes(name) == [ended]
        if state == "after the finish":
            assert ended == "length"
        elif overlap:
            assert ended == "abort"
    others.drain()
    driver.add("whole pool", ids(range(60)), token_params(max_tokens=4, ignore_eos=True))
    driver.drain()
    assert driver.finishes("whole pool") == ["length"]


def test_sch_07_abort_while_preempted():
    driver = harness(policy="priority", max_num_seqs=3).driver
    driver.add("r", ids(PROMPT), target(max_tokens=20), priority=5)
    driver.step(6)
    assert driver.tokens("r")
    for i in range(2):
        driver.add(f"u{i}", ids([1, 2]), LONG, priority=-1)
    driver.step()
    seq = next(s for s in driver.engine.core.scheduler.waiting if s.request.request_id == "r")
    assert seq.preemptions == 1
    driver.abort("r")
    driver.drain()
    assert driver.finishes("r") == ["abort"]


@pytest.mark.parametrize("steps", range(8))
def test_sch_07_abort_of_several_choices(steps):
    """Some wait for the prompt of the first, some run, some are finished."""
    driver = harness(max_num_seqs=4).driver
    driver.add("r", ids(PROMPT), token_params(n=4, max_tokens=2, ignore_eos=True))
    driver.step(steps)
    driver.abort("r")
    driver.drain()
    reasons = driver.finishes("r")
    assert len(reasons) == 4
    assert set(reasons) <= {"abort", "length"}


def test_sch_07_nothing_of_an_aborted_request_is_cached_but_what_was_computed():
    """The chunk in flight at the abort is not in the prefix cache; committed chunks are, and are right."""
    driver = harness().driver
    driver.add("r", ids(PROMPT), token_params(max_tokens=3, ignore_eos=True))
    driver.step(2)
    driver.abort("r")
    driver.step(3)
    driver.add("again", ids(PROMPT), token_params(max_tokens=3, ignore_eos=True))
    driver.drain()
    assert driver.output("again").num_cached_tokens == 4


@pytest.mark.parametrize("overlap", [0, 1])
def test_sch_07_aborting_everything_at_once(overlap):
    driver = harness(overlap).driver
    for i in range(5):
        driver.add(f"r{i}", ids(PROMPT), target())
    driver.step(2)
    for name in list(driver.deltas):
        driver.abort(name)
    driver.drain()
    assert all(driver.finishes(name) == ["abort"] for name in driver.deltas)
    assert_clean(driver.engine)
    assert driver.engine.core.scheduler.kv.usage == 0


def test_unknown_requests_are_ignored():
    driver = harness().driver
    driver.abort("never seen")
    driver.drain()


def test_news_before_the_abort_is_not_lost():
    """Text and tokens that were final stay; the abort is the last event."""
    driver = harness().driver
    driver.add("r", ids(PROMPT), target(max_tokens=10))
    while len(driver.tokens("r")) < 3:
        driver.step()
    count = len(driver.tokens("r"))
    driver.abort("r")
    driver.drain()
    assert len(driver.tokens("r")) == count
    assert driver.deltas["r"][-1].finish_reason is not None
