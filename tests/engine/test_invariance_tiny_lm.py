"""A request does not depend on its neighbours, its schedule, or what the cache holds: the real runner on Tiny LM.

Tokens are equal in every case, sampled ones too, because the only random number of a position comes from the
request's own stream. Log-probabilities are compared with a cold solo run (no prefix cache, no chunks, no overlap):
bit by bit where the sequence is cut into the same chunks and nothing shares its steps, and within ``BOUND`` where sums
are formed in another order or in a program of another shape. See docs/invariance.md for the measured differences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.build import Engine
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import TinyModel, prompt_ids, tiny_model, tiny_settings

pytestmark = pytest.mark.kernels

BOUND = 5e-5
COMMON: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "detokenize": False, "logprobs": 4, "seed": 7}
PARAMS = (
    SamplingParams(temperature=0, **COMMON),
    SamplingParams(temperature=1, **COMMON),
    SamplingParams(temperature=0.9, top_k=60, top_p=0.9, min_p=0.01, **COMMON),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.4, logprobs_mode="processed", **COMMON
    ),
)
PROMPTS = (prompt_ids(13), prompt_ids(21, 1), prompt_ids(9, 2), prompt_ids(13)[:10] + prompt_ids(5, 4))
PROBES = range(len(PROMPTS))


@dataclass(frozen=True)
class Seen:
    """What a user sees of a request: tokens, and the log-probabilities of each position by token id."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]

    @classmethod
    def of(cls, output: RequestOutput) -> "Seen":
        choice = output.outputs[0]
        assert isinstance(choice.logprobs, list)
        entries = tuple({token: e.logprob for token, e in position.items()} for position in choice.logprobs)
        return cls(tuple(choice.token_ids), entries)

    def assert_close(self, other: "Seen", bound: float) -> None:
        assert self.tokens == other.tokens
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            # The last of the reported alternatives may swap with the next one, if they tie within the bound.
            both = mine.keys() & theirs.keys()
            assert len(both) >= len(mine) - 1
            for token in both:
                a, b = mine[token], theirs[token]
                assert a == b or abs(a - b) <= bound, f"log-probability of {token}: {a} and {b}"


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model()


def cold(model: TinyModel, **options: Any) -> Engine:
    return model.engine(tiny_settings(**{"prefix_caching": False, "overlap": 0, **options}))


def alone(engine: Engine, probe: int) -> Seen:
    return Seen.of(run(engine, [Job(ids(PROMPTS[probe]), PARAMS[probe])])[0])


def cold_runs(model: TinyModel) -> list[Seen]:
    """Each probe alone in an engine of its own."""
    return [alone(cold(model), probe) for probe in PROBES]


@pytest.fixture(scope="module")
def solo(model: TinyModel) -> list[Seen]:
    return [alone(cold(model), probe) for probe in PROBES]


def together(
    engine: Engine, order: tuple[int, ...], arrivals: tuple[int, ...] = (0, 0, 0, 0)
) -> dict[int, Seen]:
    outputs = run(engine, [Job(ids(PROMPTS[p]), PARAMS[p], at=at) for p, at in zip(order, arrivals)])
    return {p: Seen.of(output) for p, output in zip(order, outputs)}


def assert_all_close(seen: dict[int, Seen], solo: list[Seen], bound: float = BOUND) -> None:
    for probe, what in seen.items():
        what.assert_close(solo[probe], bound)


def test_solo_run_equals_a_dense_forward(model: TinyModel, solo: list[Seen]) -> None:
    """Log-probabilities of the first three probes ("raw") against a float64 forward without a cache."""
    assert list(solo[0].tokens) == model.greedy(PROMPTS[0], 14)
    for probe in PROBES[:3]:
        sequence = [*PROMPTS[probe], *solo[probe].tokens]
        logits_TV = model.logits(sequence)[len(PROMPTS[probe]) - 1 : -1]
        logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        for expected_V, entries in zip(logprobs_TV, solo[probe].logprobs, strict=True):
            assert all(abs(expected_V[token] - value) <= BOUND for token, value in entries.items())


@pytest.mark.feature("overlap", "seeds", "logprobs", "sampling")
@pytest.mark.parametrize(
    "options", [{}, {"overlap": 1}, {"prefix_caching": True}, {"num_blocks": 30}], ids=str
)
def test_restart_overlap_and_pool_size_change_no_bit(
    model: TinyModel, solo: list[Seen], options: dict[str, Any]
) -> None:
    assert_all_close({p: alone(cold(model, **options), p) for p in PROBES}, solo, bound=0.0)


@pytest.mark.feature("chunked prefill", "seeds", "logprobs", "sampling")
@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_chunk_size(model: TinyModel, solo: list[Seen], chunk: int) -> None:
    assert_all_close({p: alone(cold(model, chunk_size=chunk), p) for p in PROBES}, solo)


@pytest.mark.feature("continuous batching", "seeds", "logprobs", "sampling")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("order", "arrivals"),
    [((0, 1, 2, 3), (0, 0, 0, 0)), ((3, 2, 1, 0), (0, 0, 0, 0)), ((2, 0, 3, 1), (0, 3, 5, 9))],
)
def test_batch_mates_and_arrival_order(
    model: TinyModel, solo: list[Seen], order: tuple[int, ...], arrivals: tuple[int, ...], overlap: int
) -> None:
    engine = model.engine(tiny_settings(overlap=overlap))
    assert_all_close(together(engine, order, arrivals), solo)


@pytest.mark.feature("prefix cache", "seeds", "logprobs", "sampling")
@pytest.mark.parametrize("shared", [3, 4, 7, 12])
@pytest.mark.parametrize("overlap", [0, 1])
def test_prefix_hits(model: TinyModel, solo: list[Seen], shared: int, overlap: int) -> None:
    """Hits of whole blocks and of parts of a block, of a prompt that another request shares."""
    for probe in PROBES:
        prompt = PROMPTS[probe]
        shared = min(shared, len(prompt) - 1)
        engine = model.engine(tiny_settings(overlap=overlap))
        warming = [*prompt[:shared], (prompt[shared] + 1) % 256, *prompt_ids(8, 9)]
        run(engine, [Job(ids(warming), SamplingParams(temperature=0, max_tokens=1, detokenize=False))])
        output = run(engine, [Job(ids(prompt), PARAMS[probe])])[0]
        assert output.num_cached_tokens == shared
        Seen.of(output).assert_close(solo[probe], BOUND)


@pytest.mark.feature("prefix cache", "logprobs")
def test_hit_of_the_whole_history(model: TinyModel, solo: list[Seen]) -> None:
    """The same requests again on the same engine: all but the last token come from the cache."""
    engine = model.engine(tiny_settings())
    for _ in range(3):
        assert_all_close(together(engine, (1, 3, 0, 2)), solo)
    output = run(engine, [Job(ids(PROMPTS[1]), PARAMS[1])])[0]
    assert output.num_cached_tokens == len(PROMPTS[1]) - 1


@pytest.mark.feature("preemption", "seeds", "logprobs", "sampling")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"chunk_size": 5}], ids=str)
def test_preemption(model: TinyModel, solo: list[Seen], options: dict[str, Any], overlap: int) -> None:
    """A pool that holds two of the four sequences at their full length: work is thrown away and done again."""
    engine = model.engine(tiny_settings(num_blocks=14, overlap=overlap, **options))
    seen = together(engine, (0, 1, 2, 3))
    assert engine.core.stats.preemptions > 0
    assert_all_close(seen, solo)


@pytest.mark.feature("n > 1", "seeds", "logprobs", "sampling")
def test_choices_of_a_request(model: TinyModel) -> None:
    """Choice i of n=3 is the same with and without neighbours, and choice 0 is that of n=1."""
    params = SamplingParams(n=3, temperature=1, **COMMON)
    expected = run(cold(model), [Job(ids(PROMPTS[1]), params)])[0].outputs
    assert len({tuple(choice.token_ids) for choice in expected}) == 3
    jobs = [
        Job(ids(PROMPTS[0]), PARAMS[0]),
        Job(ids(PROMPTS[1]), params),
        Job(ids(PROMPTS[2]), PARAMS[2], at=2),
    ]
    variants: list[dict[str, Any]] = [{}, {"num_blocks": 20}, {"chunk_size": 4, "overlap": 0}]
    for options in variants:
        got = run(model.engine(tiny_settings(**options)), jobs)[1].outputs
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    single = run(cold(model), [Job(ids(PROMPTS[1]), PARAMS[1])])[0].outputs[0]
    assert single.token_ids == expected[0].token_ids
