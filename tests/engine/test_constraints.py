"""Banned, allowed and biased tokens through the engine."""

import pytest

from jaxinfer.request import RequestError
from jaxinfer.sampling_params import SamplingParams
from tests.support.engines import Job, config, ids, run, scripted, static_script, uniform_script
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("bias, allowed ids, bad words")

A, B, C = 65, 66, 67
TOKENIZER = ByteTokenizer(literals=("AB",))
LOGITS = {A: 3.0, B: 2.0, C: 1.0}


def generate(overlap: int = 1, script=None, **params) -> tuple[list[int], str]:
    engine = scripted(script or static_script(LOGITS), config(overlap=overlap), tokenizer=TOKENIZER)
    values = {"temperature": 0, "max_tokens": 5, **params}
    (output,) = run(engine, [Job(ids([1, 2, 3]), SamplingParams(**values))])
    return output.outputs[0].token_ids, output.outputs[0].text


@pytest.mark.parametrize("overlap", [0, 1])
def test_bad_words_of_one_token(overlap):
    assert generate(overlap, bad_words=["A"])[0] == [B] * 5
    assert generate(overlap, bad_words=["A", "B"])[0] == [C] * 5


@pytest.mark.parametrize("overlap", [0, 1])
def test_bad_words_of_several_tokens(overlap):
    """Only the token that would complete the word is banned, where it would complete it."""
    assert generate(overlap, bad_words=["AA"])[0] == [A, B, A, B, A]
    assert generate(overlap, bad_words=["AA", "BA"])[0] == [A, B, B, B, B]
    text = generate(overlap, bad_words=["AAA"], max_tokens=9)[1]
    assert text == "AABAABAAB"


@pytest.mark.parametrize("overlap", [0, 1])
def test_bad_words_of_several_tokens_with_neighbours_and_preemption(overlap):
    """Rows that wait for their history do not hold up the others, and history is complete after a preemption."""
    engine = scripted(
        static_script(LOGITS),
        config(overlap=overlap, num_blocks=8, max_num_seqs=3, chunk_size=4),
        tokenizer=TOKENIZER,
    )
    jobs = [
        Job(
            ids([i, i, i]),
            SamplingParams(temperature=0, max_tokens=12, bad_words=["AAA"] if i % 2 else [], ignore_eos=True),
        )
        for i in range(5)
    ]
    outputs = run(engine, jobs)
    for i, output in enumerate(outputs):
        assert output.outputs[0].text == ("AABAABAABAAB" if i % 2 else "A" * 12)
    assert engine.core.stats.preemptions > 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_bad_words_are_found_with_a_leading_space(overlap):
    script = static_script({32: 3.0, A: 2.0, B: 1.0})
    tokens, _ = generate(overlap, script, bad_words=["A"], allowed_token_ids=[A, B])
    assert tokens == [B] * 5


def test_allowed_token_ids():
    assert generate(allowed_token_ids=[C])[0] == [C] * 5
    assert generate(allowed_token_ids=[B, C], max_tokens=3)[0] == [B] * 3
    tokens, _ = generate(
        script=uniform_script(), allowed_token_ids=[B, C], temperature=1.0, seed=1, max_tokens=20
    )
    assert set(tokens) == {B, C}


def test_logit_bias():
    assert generate(logit_bias={A: -2})[0] == [B] * 5
    assert generate(logit_bias={str(C): 5})[0] == [C] * 5
    assert generate(logit_bias={200: 100})[0] == [200] * 5


def test_bias_does_not_lift_a_ban():
    assert generate(logit_bias={A: 100}, bad_words=["A"])[0] == [B] * 5
    assert generate(logit_bias={A: 100}, allowed_token_ids=[C])[0] == [C] * 5


def test_constraints_of_one_request_do_not_change_its_neighbours():
    engine = scripted(static_script(LOGITS), tokenizer=TOKENIZER)
    params = [{}, {"bad_words": ["A"]}, {"allowed_token_ids": [C]}, {"logit_bias": {9: 50}}, {}]
    jobs = [Job(ids([1]), SamplingParams(temperature=0, max_tokens=4, **p)) for p in params]
    assert [o.outputs[0].token_ids[0] for o in run(engine, jobs)] == [A, B, C, 9, A]


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [A], "bad_words": ["A"]},
        {"allowed_token_ids": [A, 257], "bad_words": ["A"], "min_tokens": 1},
        {"allowed_token_ids": [257, 258], "min_tokens": 1},
        {"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 1},
    ],
)
def test_constraints_that_leave_no_token_are_refused(params):
    with pytest.raises((RequestError, ValueError), match="allowed_token_ids"):
        generate(**params)
