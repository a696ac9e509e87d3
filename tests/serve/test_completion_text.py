"""``/v1/completions``: the text of answers, and the log-probabilities beside it."""

import pytest

from tests.support import engines
from tests.support.completions import complete, same_both_ways
from tests.support.scripts import say
from tests.support.servers import running_server, sse_events
from tests.support.tokenizers import ByteTokenizer, SpmTokenizer

pytestmark = pytest.mark.feature("http", "completions")

EURO = "\u20ac".encode()
EMOJI = "\U0001f600".encode()


@pytest.fixture(scope="module")
def server():
    engine = engines.scripted(say(list(b"four")), tokenizer=ByteTokenizer())
    with running_server(engine) as running:
        yield running


@pytest.mark.parametrize(("character", "cut"), [(EURO, 1), (EURO, 2), (EMOJI, 1), (EMOJI, 2), (EMOJI, 3)])
def test_det_01_prompt_ids_that_end_inside_a_character(character, cut):
    """Pinned: the character belongs to the completion, whole; the token that ended it is not counted."""
    script = say([*character[cut:], ord("5")])
    with running_server(engines.scripted(script, tokenizer=ByteTokenizer())) as server:
        answer = same_both_ways(server, prompt=[*b"Hi ", *character[:cut]], logprobs=1, return_token_ids=True)
        (choice,) = answer["choices"]
        assert choice["text"] == character.decode() + "5"
        assert answer["usage"]["completion_tokens"] == len(character) - cut + 1
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == len(character) - cut + 1


def test_det_01_with_byte_fallback_tokens():
    tokenizer = SpmTokenizer(("_Hi", "_a"))
    script = say(tokenizer.ids([0xAC, "_a"]), eos=2)
    engine = engines.scripted(script, tokenizer=tokenizer, eos=(2,))
    with running_server(engine) as server:
        answer = same_both_ways(server, prompt=tokenizer.ids(["_Hi", 0xE2, 0x82]))
        assert answer["choices"][0]["text"] == "\u20ac a"


def test_det_03_max_tokens_cuts_inside_a_character():
    """Pinned: the incomplete tail is one U+FFFD."""
    script = say([*b"ok", *EMOJI[:3], EMOJI[3]])
    with running_server(engines.scripted(script, tokenizer=ByteTokenizer())) as server:
        answer = same_both_ways(server, prompt="a", max_tokens=5, logprobs=1)
        (choice,) = answer["choices"]
        assert choice["text"] == "ok\ufffd"
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]
        assert complete(server, prompt="a", max_tokens=6)["choices"][0]["text"] == "ok\U0001f600"


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_lpb_01_logprobs_of_completions(server, logprobs):
    (choice,) = same_both_ways(server, prompt="a", logprobs=logprobs)["choices"]
    shown = choice["logprobs"]
    assert shown["tokens"] == list("four")
    assert shown["text_offset"] == [0, 1, 2, 3]
    for token, value, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) == max(logprobs, 1)
        assert max(top, key=top.__getitem__) == token


@pytest.mark.parametrize("logprobs", [21, 1_000_000, -1])
def test_lpb_01_too_many_logprobs_are_400(server, logprobs):
    response = server.client.post("/v1/completions", json={"prompt": "a", "logprobs": logprobs})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    assert complete(server, prompt="a")["choices"][0]["text"] == "four"


def test_banned_tokens_have_a_finite_logprob(server):
    """Minus infinity, which JSON cannot spell, is -9999."""
    (choice,) = same_both_ways(
        server, prompt="a", logprobs=2, allowed_token_ids=[ord("f")], max_tokens=1, logprobs_mode="processed"
    )["choices"]
    assert sorted(choice["logprobs"]["top_logprobs"][0].values())[0] == -9999.0


def test_echo_leads_the_first_chunk(server):
    chunks = sse_events(
        server.client.post("/v1/completions", json={"prompt": "ab", "echo": True, "stream": True})
    )
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert texts[0].startswith("abf")
    assert "".join(texts) == "abfour"


def test_echo_offsets_with_characters_of_several_tokens(server):
    (choice,) = same_both_ways(server, prompt="x\u20acy", echo=True, logprobs=1)["choices"]
    assert choice["text"] == "x\u20acyfour"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 3, 4, 5, 6]
    assert choice["logprobs"]["token_logprobs"][0] is None
    (choice,) = same_both_ways(server, prompt=[*b"x", 256, *b"y"], echo=True, logprobs=1)["choices"]
    assert choice["text"] == "xyfour"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    body = {"prompt": [*b"x", 256, *b"y"], "echo": True, "logprobs": 1, "skip_special_tokens": False}
    (choice,) = same_both_ways(server, **body)["choices"]
    assert choice["text"].startswith("x<|bos|>y")
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 8, 9]
    (choice,) = same_both_ways(server, prompt="x<|bos|>y", echo=True, logprobs=1)["choices"]
    assert choice["text"] == "x<|bos|>yfour"
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 8, 9]


def test_stop_reasons(server):
    assert complete(server, prompt="a", stop=["ur", "zz"])["choices"][0]["stop_reason"] == "ur"
    assert complete(server, prompt="a", stop="ur")["choices"][0]["text"] == "fo"
    by_token = same_both_ways(server, prompt="a", stop_token_ids=[ord("u")])["choices"][0]
    assert (by_token["text"], by_token["finish_reason"], by_token["stop_reason"]) == ("fo", "stop", ord("u"))
    kept = same_both_ways(server, prompt="a", stop="ou", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "fou"
    assert complete(server, prompt="a", max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_token_ids_and_prompt_logprobs_on_request(server):
    answer = complete(server, prompt="abc", return_token_ids=True, prompt_logprobs=1, n=2)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == list(b"abc")
        assert choice["token_ids"] == list(b"four")
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for token, position in zip(b"bc", rest, strict=True):
            assert position[str(token)].keys() == {"logprob", "rank", "decoded_token"}
            assert position[str(token)]["decoded_token"] == chr(token)
    response = server.client.post(
        "/v1/completions", json={"prompt": "a", "prompt_logprobs": 1, "stream": True}
    )
    assert response.status_code == 400
    assert "prompt_logprobs" in response.json()["error"]["message"]


def test_tokens_as_token_ids(server):
    body = {"prompt": "a", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = same_both_ways(server, **body)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in b"afour"]
    assert choice["logprobs"]["top_logprobs"][-1].keys() == {f"token_id:{ord('r')}"}


def test_named_tokens_are_reported(server):
    (choice,) = complete(server, prompt="a", logprobs=0, logprob_token_ids=[ord("z")])["choices"]
    assert [sorted(top) for top in choice["logprobs"]["top_logprobs"]] == [sorted({"z", c}) for c in "four"]


def test_truncated_prompts(server):
    def seen(**body) -> list[int]:
        answer = complete(server, prompt="abcdef", return_token_ids=True, max_tokens=1, **body)
        return answer["choices"][0]["prompt_token_ids"]

    assert bytes(seen(truncate_prompt_tokens=2)) == b"ef"
    assert bytes(seen(truncate_prompt_tokens=2, truncation_side="right")) == b"ab"
    assert bytes(seen(truncate_prompt_tokens=9)) == b"abcdef"
    assert bytes(seen(truncate_prompt_tokens=-1)) == b"abcdef"
    long = complete(server, prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=10, return_token_ids=True)
    assert long["usage"]["prompt_tokens"] == 54
    echoed = complete(server, prompt="abcdef", truncate_prompt_tokens=2, echo=True)
    assert echoed["choices"][0]["text"] == "effour"
