"""Random streams of choices and prompts over HTTP."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import engines
from tests.support.servers import Server, fold_completion, running_server, sse_events
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions", "seeds", "n > 1")


def uniform_engine():
    return engines.scripted(engines.uniform_script(), tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def server():
    with running_server(uniform_engine()) as running:
        yield running


def sample(server: Server, **body) -> list[tuple[int, ...]]:
    """Token ids of the choices."""
    fields = {"prompt": "a", "max_tokens": 16, "temperature": 1, "ignore_eos": True, "return_token_ids": True}
    response = server.client.post("/v1/completions", json={**fields, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    return [tuple(choice["token_ids"]) for choice in answer["choices"]]


def test_smp_02_seeded_choices_differ_and_repeat(server):
    """Pinned: a request with n=1 gets choice 0 of the one with n=4."""
    first = sample(server, n=4, seed=7)
    assert len(set(first)) == 4
    assert sample(server, n=4, seed=7) == first
    assert sample(server, seed=7) == first[:1]
    greedy = sample(server, n=4, temperature=0)
    assert len(set(greedy)) == 1
    assert len(greedy) == 4


def test_smp_02_prompts_of_one_call_are_independent_of_their_place(server):
    a, b = sample(server, prompt=["a", "b"], seed=7)
    assert a != b
    assert sample(server, prompt=["b", "a"], seed=7) == [b, a]
    assert sample(server, prompt="b", seed=7) == [b]


def test_smp_02_usage_counts_the_prompt_once(server):
    body = {"prompt": "abcde", "n": 4, "seed": 7, "max_tokens": 5, "ignore_eos": True}
    usage = server.client.post("/v1/completions", json=body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 20)


def test_smp_02_streams_give_the_same_choices(server):
    body = {"prompt": "a", "max_tokens": 16, "n": 3, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    folded = fold_completion(sse_events(server.client.post("/v1/completions", json={**body, "stream": True})))
    assert [tuple(folded.choices[i].token_ids) for i in range(3)] == sample(server, n=3, seed=7)


@pytest.mark.parametrize("seed", [{}, {"seed": None}])
def test_smp_03_without_a_seed_nothing_repeats(server, seed):
    found = [sample(server, **seed)[0] for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        found += [choices[0] for choices in pool.map(lambda _: sample(server, **seed), range(4))]
    found += sample(server, n=3, **seed)
    with running_server(uniform_engine()) as restarted:
        found += sample(restarted, **seed)
    assert len(set(found)) == len(found) == 11


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_smp_03_every_integer_is_a_seed(server, seed):
    assert sample(server, seed=seed) == sample(server, seed=seed)
    assert sample(server, seed=seed) != sample(server, seed=1)
