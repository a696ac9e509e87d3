"""Log-probabilities of prompts and answers over HTTP: LPB-02, LPB-05, and what lm-eval asks for."""

import numpy as np
import pytest

from tests.support import engines
from tests.support.scripts import say
from tests.support.servers import Server, fold_completion, running_server, sse_events
from tests.support.tiny_models import tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("http", "completions", "logprobs", "prompt logprobs")

LITERALS = (" b", " ha", " c")


@pytest.fixture(scope="module")
def tiny():
    settings = tiny_settings(chunk_size=8)
    with running_server(tiny_model().engine(settings, tokenizer=ByteTokenizer())) as running:
        yield running


def complete(server: Server, **body) -> dict:
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def reference(ids: list[int]) -> np.ndarray:
    """Log-softmax [T, V] of one full forward pass."""
    logits = tiny_model().logits(ids)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_scored(choice: dict, ids: list[int], num_prompt: int, num_top: int) -> None:
    """The choice has right log-probabilities of all its tokens."""
    shown = choice["logprobs"]
    assert len({len(values) for values in shown.values()} | {len(ids)}) == 1
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    expected = reference(ids)
    tokenizer = ByteTokenizer()
    for i in range(1, len(ids)):
        assert abs(shown["token_logprobs"][i] - expected[i - 1, ids[i]]) < 1e-4
        top = shown["top_logprobs"][i]
        token = shown["tokens"][i]
        assert abs(top[token] - shown["token_logprobs"][i]) < 1e-6 or token == "\ufffd"
        best = np.argsort(expected[i - 1])[::-1][:num_top]
        assert {tokenizer.decode([int(t)], skip_special_tokens=False) for t in best} <= set(top)
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize(
    "prompt", ["abcdef", "a", "x\u20ac\U0001f600y", "longer than one chunk of the prefill"]
)
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("form", ["text", "ids", "list"])
def test_lpb_02_echo_scores_the_prompt(tiny, prompt, max_tokens, form):
    ids = list(prompt.encode())
    given = {"text": prompt, "ids": ids, "list": [prompt, "second prompt"]}[form]
    body = {"prompt": given, "echo": True, "max_tokens": max_tokens, "logprobs": 2, "temperature": 0}
    answer = complete(tiny, **body, return_token_ids=True)
    prompts = [ids] if form != "list" else [ids, list(b"second prompt")]
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for choice, prompt_ids in zip(answer["choices"], prompts, strict=True):
        assert choice["finish_reason"] == "length"
        text = bytes(prompt_ids).decode()
        assert choice["text"].startswith(text)
        assert max_tokens > 0 or choice["text"] == text
        assert len(choice["token_ids"]) == max_tokens
        assert_scored(choice, [*prompt_ids, *choice["token_ids"]], len(prompt_ids), 2)


@pytest.mark.parametrize("n", [1, 3])
def test_lpb_02_streams_score_too(tiny, n):
    body = {
        "prompt": ["abcdef", "xyz"],
        "echo": True,
        "max_tokens": 2,
        "logprobs": 1,
        "temperature": 0,
        "n": n,
    }
    whole = complete(tiny, **body)
    folded = fold_completion(sse_events(tiny.client.post("/v1/completions", json={**body, "stream": True})))
    for choice in whole["choices"]:
        assert folded.choices[choice["index"]].text == choice["text"]
        streamed = folded.choices[choice["index"]].logprobs
        assert streamed["tokens"] == choice["logprobs"]["tokens"]
        assert streamed["text_offset"] == choice["logprobs"]["text_offset"]
        assert streamed["token_logprobs"][0] is None
        got, expected = streamed["token_logprobs"][1:], choice["logprobs"]["token_logprobs"][1:]
        assert np.allclose(got, expected, atol=1e-5)


def test_lpb_02_several_choices_of_a_scored_prompt(tiny):
    """Every choice is scored, also those whose first token comes before the first choice's."""
    body = {"prompt": ["abcdef", "xyz"], "echo": True, "max_tokens": 0, "logprobs": 1, "n": 3}
    answer = complete(tiny, **body)
    assert [choice["text"] for choice in answer["choices"]] == ["abcdef"] * 3 + ["xyz"] * 3
    for choice in answer["choices"]:
        assert_scored(choice, list(choice["text"].encode()), len(choice["text"]), 1)
    assert answer["usage"]["completion_tokens"] == 0


def test_lpb_02_order_of_requests_does_not_matter(tiny):
    """Scores do not depend on what the prefix cache holds."""
    body = {"echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
    first = complete(tiny, prompt="shared prefix and a", **body)
    complete(tiny, prompt="shared prefix and b", max_tokens=3)
    second = complete(tiny, prompt="shared prefix and a", **body)
    a, b = (x["choices"][0]["logprobs"]["token_logprobs"][1:] for x in (first, second))
    assert np.allclose(a, b, atol=1e-5)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_requests_of_lm_eval(tiny):
    """``local-completions``: a batch of token lists with echo; the log-likelihood of a continuation is the sum over
    its tokens, and it is greedy if each token is the most likely one of its position."""
    contexts = [b"the cat", b"a", b"some text"]
    greedy = [tiny_model().greedy(list(context), 4) for context in contexts]
    continuations = [greedy[0], [*greedy[1][:3], (greedy[1][3] + 1) % 256], list(b"else")]
    prompts = [
        [*context, *continuation] for context, continuation in zip(contexts, continuations, strict=True)
    ]
    answer = complete(
        tiny, model="test", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    is_greedy = []
    for choice, context, ids in zip(answer["choices"], contexts, prompts, strict=True):
        shown, start = choice["logprobs"], len(context)
        values = shown["token_logprobs"][start:-1]
        tops = shown["top_logprobs"][start:-1]
        expected = reference(ids)
        rows = [expected[i - 1, ids[i]] for i in range(start, len(ids))]
        assert len(values) == len(rows)
        assert abs(sum(values) - sum(rows)) < 1e-3
        is_greedy.append(all(value == max(top.values()) for value, top in zip(values, tops, strict=True)))
    assert is_greedy == [True, False, False]


SCRIPT = ("a", " b", " ha", " ha", " ha", " c")
STOPS = {
    "stop token": ({"stop_token_ids": [266]}, 257, 5),
    "stop string": ({"stop": [" ha ha"]}, 257, 2),
    "second end token": ({}, 258, 6),
}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("case", STOPS)
def test_lpb_05_text_ids_and_logprobs_are_cut_together(case, include):
    """Pinned: with ``include_stop_str_in_output`` the end is part of all three; no entry begins behind it."""
    fields, eos, kept = STOPS[case]
    tokenizer = ByteTokenizer(LITERALS)
    ids = [tokenizer.id_of(token) for token in SCRIPT]
    body = {
        "prompt": "x",
        "logprobs": 1,
        "return_token_ids": True,
        "include_stop_str_in_output": include,
        **fields,
    }
    with running_server(engines.scripted(say(ids, eos=eos), tokenizer=tokenizer)) as server:
        (choice,) = complete(server, **body)["choices"]
        folded = fold_completion(
            sse_events(server.client.post("/v1/completions", json={**body, "stream": True}))
        )
    shown = choice["logprobs"]
    assert len(choice["token_ids"]) == len(shown["tokens"]) == len(shown["token_logprobs"])
    assert len(shown["tokens"]) == len(shown["text_offset"]) == len(shown["top_logprobs"])
    if include:
        kept += 2 if case == "stop string" else 1
    assert len(choice["token_ids"]) == kept
    visible = [token for token in choice["token_ids"] if token < 256 or token > 263]
    assert choice["text"] == "".join(tokenizer.token_str(token) for token in visible)
    assert all(offset <= len(choice["text"]) for offset in shown["text_offset"])
    assert choice["finish_reason"] == "stop"
    streamed = folded.choices[0]
    assert (streamed.text, streamed.token_ids, streamed.logprobs) == (
        choice["text"],
        choice["token_ids"],
        shown,
    )


def test_long_scored_prompts_do_not_hold_up_other_calls():
    """Their log-probabilities are spelled beside the event loop; the answer is the same."""
    prompt, count = "0123456789" * 20, 8
    settings = engines.config(max_num_batched_tokens=512, num_blocks=600)
    engine = engines.scripted(say([]), settings, tokenizer=ByteTokenizer(), max_model_len=256)
    with running_server(engine) as server:
        body = {"prompt": [prompt] * count, "echo": True, "max_tokens": 0, "logprobs": 1}
        whole = complete(server, **body)
        streamed = server.client.post("/v1/completions", json={**body, "stream": True})
        folded = fold_completion(sse_events(streamed))
    for choice in whole["choices"]:
        assert choice["text"] == prompt
        assert choice["logprobs"]["text_offset"] == list(range(200))
        assert folded.choices[choice["index"]].logprobs == choice["logprobs"]
