"""Random scenarios for the engine: settings, requests, aborts; on shadow memory, checked against a pure model."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.engine.deltas import OutputDelta
from jaxinfer.request import FinishReason, QueueFullError, RequestError, Sequence
from jaxinfer.sampling_params import SamplingParams
from tests.support import engines
from tests.support.shadow_runner import ShadowModel, ShadowRunner, histories

SPAN = 6
EOS = 5
VOCAB = 8
MAX_MODEL_LEN = 40
BASES = tuple(tuple((i * k + k) % SPAN for i in range(MAX_MODEL_LEN)) for k in (1, 5))
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 4), (None, 3, 9), (5,), (1, 6))


@dataclass(frozen=True)
class Ask:
    """A request of a scenario.

    Attributes:
        at: step before which it arrives.
        abort_at: step before which it is aborted, if it is still there.
        sick_at: output position at which the logits are NaN; with n=1 only, since siblings share the prompt.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    at: int
    priority: int = 0
    salt: str | None = None
    abort_at: int | None = None
    sick_at: int | None = None


@dataclass(frozen=True)
class Scenario:
    settings: EngineConfig
    windows: tuple[int | None, ...]
    asks: tuple[Ask, ...]


@dataclass
class Record:
    """What came out of a scenario.

    Attributes:
        tokens, logprobs: by (request, choice).
        ends: finish reason by (request, choice); exactly one each.
        refused: requests that the admission limits or the pool's size turned away.
    """

    sequences: dict[tuple[int, int], Sequence] = field(default_factory=dict)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[float | None]] = field(default_factory=dict)
    ends: dict[tuple[int, int], FinishReason] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    cached: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def add(self, delta: OutputDelta) -> None:
        key = (int(delta.request_id), delta.index)
        assert key not in self.ends, "news after the end of a choice"
        self.tokens.setdefault(key, []).extend(delta.token_ids)
        self.logprobs.setdefault(key, []).extend(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            assert key[0] not in self.prompt_logprobs, "prompt log-probabilities are given once"
            self.prompt_logprobs[key[0]] = [None if e is None else e.logprob for e in delta.prompt_logprobs]
        if delta.finish_reason is not None:
            self.ends[key] = delta.finish_reason
            self.cached[key[0]] = delta.num_cached_tokens


@st.composite
def settings_of(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 5))
    return engines.config(
        block_size=draw(st.sampled_from([1, 2, 4, 5])),
        num_blocks=draw(st.integers(4, 24)),
        prefix_caching=draw(st.integers(0, 3)) > 0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 24)),
        chunk_size=draw(st.none() | st.integers(1, 9)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_preemptions=draw(st.integers(0, 3)),
        overlap=draw(st.integers(0, 1)),
        max_waiting_seqs=draw(st.none() | st.none() | st.integers(3, 9)),
        max_waiting_tokens=draw(st.none() | st.none() | st.integers(20, 90)),
    )


@st.composite
def ask_of(draw: st.DrawFn) -> Ask:
    salt = draw(st.sampled_from([None, None, None, "a"]))
    base = draw(st.sampled_from(BASES))
    prompt = list(base[: draw(st.integers(1, 22))])
    prompt += ShadowModel(SPAN).greedy_tokens(histories(salt, prompt)[-1], draw(st.integers(0, 8)))
    prompt += draw(st.lists(st.integers(0, SPAN - 1), max_size=3))
    greedy = draw(st.booleans())
    params = SamplingParams(
        n=1 if draw(st.booleans()) else draw(st.integers(1, 3)),
        temperature=0.0 if greedy else 1.0,
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.sampled_from([0, 1, 2, 5, 9, None])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (2,)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        logprobs=0,
        detokenize=False,
    )
    at = draw(st.integers(0, 25))
    return Ask(
        tuple(prompt),
        params,
        at,
        priority=draw(st.integers(0, 2)),
        salt=salt,
        abort_at=draw(st.none() | st.integers(at, at + 12)),
        sick_at=draw(st.sampled_from([None] * 7 + [0, 2])) if params.n == 1 else None,
    )


@st.composite
def scenario_of(draw: st.DrawFn) -> Scenario:
    return Scenario(
        draw(settings_of()),
        draw(st.sampled_from(WINDOWS)),
        tuple(draw(st.lists(ask_of(), min_size=1, max_size=9))),
    )


def build(scenario: Scenario) -> tuple[Engine, ShadowRunner]:
    runners: list[ShadowRunner] = []
    num_blocks = scenario.settings.cache.num_blocks
    assert num_blocks is not None

    def sick(request_id: str, index: int, position: int) -> bool:
        ask = scenario.asks[int(request_id)]
        return index == 0 and ask.sick_at is not None and position == len(ask.prompt) + ask.sick_at

    def make(plan: CompilePlan) -> ShadowRunner:
        runners.append(ShadowRunner(ShadowModel(SPAN, sick), plan, scenario.windows, num_blocks))
        return runners[0]

    engine = engines.build(
        make,
        scenario.settings,
        windows=scenario.windows,
        vocab=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        eos=(EOS,),
    )
    runners[0].kv = engine.core.scheduler.kv
    return engine, runners[0]


def play(scenario: Scenario, max_steps: int = 2000) -> Record:
    """Runs a scenario; after every step the engine is checked and must have made progress."""
    engine, runner = build(scenario)
    core, record = engine.core, Record()
    for step in range(max_steps):
        for i, ask in enumerate(scenario.asks):
            if ask.at == step:
                _add(engine, record, i, ask)
        for i, ask in enumerate(scenario.asks):
            if ask.abort_at == step and i not in record.refused:
                core.abort(str(i))
        _step(engine, runner, record)
        if step > 40 and not core.has_work:
            record.steps = step
            engines.assert_clean(engine)
            assert runner.num_dispatched == runner.num_results
            return record
    raise AssertionError(f"the requests did not end within {max_steps} steps")


def _add(engine: Engine, record: Record, i: int, ask: Ask) -> None:
    try:
        prompt = {"prompt_token_ids": ask.prompt} | ({"cache_salt": ask.salt} if ask.salt else {})
        sequences = engine.inputs.process(str(i), prompt, ask.params, ask.priority)
        engine.core.add(sequences)
    except (QueueFullError, RequestError):
        record.refused.add(i)
        return
    for seq in sequences:
        record.sequences[i, seq.index] = seq


def _step(engine: Engine, runner: ShadowRunner, record: Record) -> None:
    core = engine.core
    before = (runner.num_dispatched, runner.num_results)
    had_work = core.scheduler.has_work or runner.num_dispatched > runner.num_results
    for delta in core.step():
        record.add(delta)
    core.check_integrity()
    if had_work:
        assert (runner.num_dispatched, runner.num_results) != before, "a step without progress"


def expected(scenario: Scenario, seq: Sequence) -> tuple[list[int], FinishReason]:
    """Tokens and finish reason of a sequence that nobody aborts."""
    ask = scenario.asks[int(seq.request.request_id)]
    params = ask.params
    tokens: list[int] = []
    for token in ShadowModel(SPAN).output(seq, seq.max_tokens):
        if seq.index == 0 and ask.sick_at == len(tokens):
            return tokens, FinishReason.ERROR
        tokens.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            return tokens[:-1], FinishReason.STOP
    return tokens, FinishReason.LENGTH


def verify(scenario: Scenario, record: Record) -> None:
    """Every choice ended once, with the tokens and log-probabilities that it would have had alone."""
    assert set(record.ends) == set(record.sequences)
    for key, seq in record.sequences.items():
        ask = scenario.asks[key[0]]
        tokens, reason = expected(scenario, seq)
        got = record.tokens.get(key, [])
        if record.ends[key] is FinishReason.ABORT:
            assert ask.abort_at is not None
            assert got == tokens[: len(got)]
        else:
            assert (got, record.ends[key]) == (tokens, reason), key
        chain = histories(ask.salt, [*ask.prompt, *got])
        n = len(ask.prompt)
        model = ShadowModel(SPAN)
        want = [model.logprob(chain[n + i - 1], token) for i, token in enumerate(got)]
        assert record.logprobs.get(key, []) == want
        assert record.cached[key[0]] < n
        if (
            key[1] == 0
            and ask.params.prompt_logprobs is not None
            and record.ends[key] is not FinishReason.ABORT
        ):
            scored = [model.logprob(chain[p - 1], ask.prompt[p]) for p in range(1, n)]
            assert record.prompt_logprobs[key[0]] == [None, *scored]
