"""Random streams, neutral values, penalties and unhealthy logits, through the whole engine."""

import numpy as np
import pytest

from jaxinfer.request import Request
from tests.support.engines import (
    Driver,
    Job,
    config,
    ids,
    one_hot,
    run,
    scripted,
    sequence_script,
    static_script,
    token_params,
    uniform_script,
)
from tests.support.tokenizers import ByteTokenizer

LENGTH = 16


def random_params(**values):
    return token_params(**{"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, **values})


def sample(*jobs: Job, **settings) -> list[list[list[int]]]:
    """Token ids by request and choice."""
    outputs = run(scripted(uniform_script(), config(**settings)), list(jobs))
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def all_different(sequences) -> bool:
    return len({tuple(s) for s in sequences}) == len(sequences)


# ---- SMP-02


def test_smp_02_choices_have_streams_of_their_own_that_repeat():
    """Pinned: choice i of a request with n > 1 equals choice i of any other n; choice 0 equals n=1."""
    job = Job(ids([97]), random_params(n=4, seed=7))
    (first,), (again,) = sample(job), sample(job)
    assert all_different(first)
    assert first == again
    (single,) = sample(Job(ids([97]), random_params(seed=7)))
    assert single[0] == first[0]


def test_smp_02_prompts_of_a_list_are_independent_and_keep_their_result():
    a, b = Job(ids([97]), random_params(seed=7)), Job(ids([98]), random_params(seed=7))
    first, second = sample(a, b), sample(b, a)
    assert first[0] != first[1]
    assert first == [second[1], second[0]]


def test_smp_02_greedy_choices_are_equal():
    (choices,) = sample(Job(ids([97, 98]), token_params(n=4, max_tokens=LENGTH, ignore_eos=True)))
    assert choices == [[0] * LENGTH] * 4


@pytest.mark.parametrize("overlap", [0, 1])
def test_smp_02_tokens_do_not_depend_on_batch_chunks_or_overlap(overlap):
    job = Job(ids(range(20)), random_params(seed=3, n=2))
    (alone,) = sample(job, overlap=overlap)
    others = [Job(ids(range(50, 50 + i)), random_params(seed=i)) for i in range(1, 6)]
    together = sample(others[0], job, *others[1:], overlap=overlap, chunk_size=3, max_num_batched_tokens=8)
    assert together[1] == alone


# ---- SMP-03


def test_smp_03_no_seed_is_fresh_entropy_for_every_sequence():
    job = Job(ids([97]), random_params())
    engine = scripted(uniform_script())
    one_by_one = [run(engine, [job])[0].outputs[0].token_ids for _ in range(3)]
    batch = [output.outputs[0].token_ids for output in run(engine, [job] * 4)]
    (choices,) = sample(Job(ids([97]), random_params(n=3)))
    (restarted,) = sample(job)
    assert all_different([*one_by_one, *batch, *choices, *restarted])


def test_smp_03_seed_0_is_a_seed_and_none_is_absent():
    (zero,), (again,) = (
        sample(Job(ids([97]), random_params(seed=0))),
        sample(Job(ids([97]), random_params(seed=0))),
    )
    assert zero == again
    (none,), (other,) = (
        sample(Job(ids([97]), random_params(seed=None))),
        sample(Job(ids([97]), random_params(seed=None))),
    )
    assert none != other


# ---- SMP-04


def test_smp_04_spellings_of_off_are_one_and_neighbours_do_not_matter():
    seeds = range(20)
    spellings = [
        {},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 320},
        {"top_k": None},
        {"top_p": 1.0},
        {"min_p": 0.0},
    ]

    def tokens(neighbours: bool, **spelling) -> list[list[int]]:
        jobs = [
            Job(ids([97]), random_params(temperature=1.5, seed=s, max_tokens=6, **spelling)) for s in seeds
        ]
        if neighbours:
            jobs[1:1] = [
                Job(ids([98]), random_params(temperature=1.5, top_k=1, max_tokens=100), request_id="top_k"),
                Job(ids([99]), token_params(max_tokens=100, ignore_eos=True), request_id="greedy"),
            ]
        engine = scripted(uniform_script(), config(num_blocks=128), max_model_len=128)
        outputs = run(engine, jobs)
        if neighbours:
            assert outputs[1].outputs[0].token_ids == [0] * 100, "top_k=1 is greedy, ties to the lowest id"
        return [o.outputs[0].token_ids for o in outputs if o.request_id not in ("top_k", "greedy")]

    expected = tokens(False)
    assert len({tuple(t) for t in expected}) >= 15
    for spelling in spellings:
        assert tokens(True, **spelling) == expected


# ---- SMP-07

STATIC = {5: 2.0, 7: 1.9, 6: 1.5}
PENALTIES = [
    ({"repetition_penalty": 2.0}, [7, 5, 5, 5]),
    ({"presence_penalty": 1.0}, [5, 7, 6, 5]),
    ({"frequency_penalty": 0.3}, [5, 7, 5, 7]),
]


def reference(prompt: list[int], repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    logits = np.full(320, -5.0)
    for token, value in STATIC.items():
        logits[token] = value
    output: list[int] = []
    for _ in range(4):
        x = logits.copy()
        for token in {*prompt, *output}:
            x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
        for token in set(output):
            x[token] -= presence_penalty + frequency_penalty * output.count(token)
        output.append(int(x.argmax()))
    return output


@pytest.mark.parametrize(("penalty", "expected"), PENALTIES)
@pytest.mark.parametrize("overlap", [0, 1])
def test_smp_07_penalties_see_the_complete_history(penalty, expected, overlap):
    assert reference([5, 5, 6], **penalty) == expected
    engine = scripted(static_script(STATIC), config(overlap=overlap, max_num_seqs=1))
    job = Job(ids([5, 5, 6]), token_params(max_tokens=4, **penalty))
    other = Job(ids([7, 7, 7]), token_params(max_tokens=7, presence_penalty=-2.0, repetition_penalty=0.5))
    for jobs in ([job], [other, job], [other, other, job, job]):
        outputs = run(engine, jobs)
        assert [o.outputs[0].token_ids for o in outputs if o.prompt_token_ids == [5, 5, 6]] == (
            [expected] * jobs.count(job)
        )


@pytest.mark.parametrize(("penalty", "expected"), PENALTIES)
@pytest.mark.parametrize("overlap", [0, 1])
def test_smp_07_penalties_after_a_preemption(penalty, expected, overlap):
    """Preempted after 2 tokens by an urgent request that gets its batch slot and penalises other tokens."""
    engine = scripted(static_script(STATIC), config(overlap=overlap, max_num_seqs=1, policy="priority"))
    driver = Driver(engine)
    driver.add("job", ids([5, 5, 6]), token_params(max_tokens=4, **penalty), priority=5)
    while len(driver.tokens("job")) < 2:
        driver.step()
    driver.add("urgent", ids([7, 7]), token_params(max_tokens=3, frequency_penalty=2.0), priority=0)
    driver.drain()
    output = driver.output("job")
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 1
    assert output.outputs[0].token_ids == expected


# ---- SMP-08

BAD_ROWS = {"nan": np.nan, "one nan": np.nan, "one inf": np.inf, "all -inf": -np.inf}


def failing_script(kind: str, broken: list[bool]):
    """Request "bad" counts up from 65; its third row is bad while ``broken`` holds True."""

    def script(request: Request, index: int, position: int) -> np.ndarray:
        at = position - len(request.prompt_token_ids)
        row = one_hot(65 + at)
        if request.request_id == "bad" and broken[0] and at == 2:
            row[3 if kind.startswith("one") else slice(None)] = BAD_ROWS[kind]
        return row

    return script


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1, "top_p": 0.9, "logprobs": 2}])
def test_smp_08_unhealthy_logits_end_that_request_alone(kind, params):
    """Pinned: finish_reason 'error' with a message, the tokens before stay, nothing of it stays cached."""
    broken = [True]
    engine = scripted(failing_script(kind, broken))
    jobs = [
        Job(ids(range(9)), token_params(max_tokens=6, **params), request_id="bad"),
        Job(ids(range(100, 104)), token_params(max_tokens=6, **params), request_id="good"),
    ]
    bad, good = run(engine, jobs)
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in str(bad.error)
    assert bad.outputs[0].token_ids == [65, 66]
    assert good.outputs[0].token_ids == [65, 66, 67, 68, 69, 70]
    assert good.error is None
    broken[0] = False
    (healthy,) = run(engine, jobs[:1])
    assert healthy.num_cached_tokens == 0, "no block of the failed request is found again"
    assert healthy.outputs[0].token_ids == [65, 66, 67, 68, 69, 70]


def test_smp_08_other_choices_go_on():
    def script(request: Request, index: int, position: int) -> np.ndarray:
        row = one_hot(65 + index)
        if index == 1 and position == 5:
            row[:] = np.nan
        return row

    engine = scripted(script)
    (output,) = run(engine, [Job(ids(range(3)), token_params(n=3, max_tokens=4))])
    assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
    assert [c.token_ids for c in output.outputs] == [[65] * 4, [66] * 2, [67] * 4]


def test_smp_08_unhealthy_prompt_scores_are_an_error():
    def script(request: Request, index: int, position: int) -> np.ndarray:
        return np.full(320, np.nan, np.float32) if position == 3 else one_hot(65)

    engine = scripted(script, config(chunk_size=4))
    (output,) = run(engine, [Job(ids(range(12)), token_params(prompt_logprobs=1, max_tokens=3))])
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].token_ids == []


def test_smp_08_a_request_that_fails_after_a_preemption_leaves_nothing_cached():
    broken = [True]
    settings = config(max_num_seqs=1, policy="priority", overlap=0)
    engine = scripted(failing_script("nan", broken), settings)
    driver = Driver(engine)
    driver.add("bad", ids(range(9)), token_params(max_tokens=6), priority=5)
    driver.step()
    driver.add("urgent", ids([1, 2]), token_params(max_tokens=2), priority=0)
    driver.drain()
    assert driver.finishes("bad") == ["error"]
    broken[0] = False
    (healthy,) = run(engine, [Job(ids(range(9)), token_params(max_tokens=6), request_id="bad")])
    assert healthy.num_cached_tokens == 0


def test_smp_08_minus_infinity_alone_is_no_error():
    def script(request: Request, index: int, position: int) -> np.ndarray:
        row = np.full(320, -np.inf, np.float32)
        row[65] = 0
        return row

    (output,) = run(scripted(script), [Job(ids([1]), token_params(max_tokens=3, logprobs=0))])
    assert output.outputs[0].token_ids == [65, 65, 65]


def test_all_tokens_banned_by_history_is_an_error_with_a_message():
    """Only token 65 is allowed, and the bad word of two of them bans it after the first."""
    engine = scripted(sequence_script([65] * 5), tokenizer=ByteTokenizer())
    params = token_params(allowed_token_ids=[65], bad_words=["AA"], max_tokens=5)
    (output,) = run(engine, [Job(ids([1]), params)])
    assert output.outputs[0].token_ids == [65]
    assert output.outputs[0].finish_reason == "error"
    assert "banned" in str(output.error)
