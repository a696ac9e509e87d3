"""Everything that can be wrong with a request is found before it is queued."""

import numpy as np
import pytest

from jaxinfer.engine.inputs import InputProcessor, Limits
from jaxinfer.request import RequestError, Sequence
from jaxinfer.sampling_params import SamplingParams
from tests.support.tokenizers import ByteTokenizer

LIMITS = Limits(vocab_size=320, max_model_len=16, max_cached_tokens=12, num_blocks=3, block_size=4)


def process(prompt, params=None, *, tokenizer=None, **options) -> list[Sequence]:
    processor = InputProcessor(tokenizer, LIMITS, 1, (257, 258))
    return processor.process("r", prompt, params or SamplingParams(detokenize=False), **options)


def refused(prompt, match: str, param: str | None, params=None, **options) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        process(prompt, params, **options)
    assert caught.value.param == param


TEXT = ByteTokenizer()


@pytest.mark.parametrize("prompt", [[], (), {"prompt_token_ids": []}, np.zeros(0, np.int32)])
def test_empty_prompts(prompt):
    refused(prompt, "no tokens", "prompt")


def test_empty_text_needs_bos():
    refused("", "no tokens", "prompt", tokenizer=TEXT)
    (seq,) = process("", tokenizer=ByteTokenizer(add_bos=True))
    assert seq.request.prompt_token_ids == (256,)
    refused("", "no tokens", "prompt", tokenizer=ByteTokenizer(add_bos=True), add_special_tokens=False)


@pytest.mark.parametrize("token", [-1, 320, 2**31, 2**63, pytest.param(10**5000, id="5000 digits")])
def test_ids_outside_the_vocabulary(token):
    refused([1, token], r"prompt token 1 is .* outside the vocabulary \(0 to 319\)", "prompt")


@pytest.mark.parametrize("token", [1.5, 1.0, "a", "1", True, None, [1], b"a", np.float32(1), np.bool_(True)])
def test_ids_that_are_no_integers(token):
    refused([1, token], "prompt token 1 is .*; token ids are integers", "prompt")


@pytest.mark.parametrize(
    "prompt",
    [
        {1, 2},
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {"prompt_token_ids": "ab"},
        {"prompt_token_ids": {1: 2}},
        {"prompt_token_ids": 5},
        np.zeros((2, 2), np.int32),
        np.int32(5),
        5,
        (token for token in [1, 2]),
    ],
)
def test_prompts_that_are_no_flat_list(prompt):
    refused(prompt, "flat list of integers", "prompt")


@pytest.mark.parametrize("prompt", [None, {"prompt": None}, {"prompt": 5}, {"prompt": ["a"]}])
def test_prompts_that_are_no_text(prompt):
    refused(prompt, "must be a string", "prompt", tokenizer=TEXT)


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"cache_salt": "s"},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "salt": "s"},
        {"ids": [1]},
    ],
)
def test_wrong_mapping_keys(prompt):
    refused(prompt, "a prompt mapping holds", "prompt", tokenizer=TEXT)


def test_many_spellings_of_one_prompt():
    expected = (1, 2, 319)
    spellings = [
        [1, 2, 319],
        (1, 2, 319),
        np.array([1, 2, 319]),
        np.array([1, 2, 319], np.uint16),
        [np.int64(1), np.uint8(2), 319],
        {"prompt_token_ids": [1, 2, 319]},
    ]
    for prompt in spellings:
        (seq,) = process(prompt)
        assert seq.request.prompt_token_ids == expected
        assert all(type(token) is int for token in seq.request.prompt_token_ids)
    (seq,) = process(range(1, 4))
    assert seq.request.prompt_token_ids == (1, 2, 3)


def test_text_is_kept_and_tokenized():
    (seq,) = process("ab", tokenizer=TEXT)
    assert (seq.request.prompt, seq.request.prompt_token_ids) == ("ab", (97, 98))
    (seq,) = process({"prompt": "ab", "cache_salt": "s"}, tokenizer=TEXT)
    assert (seq.request.prompt, seq.request.cache_salt) == ("ab", "s")
    refused("ab", "no tokenizer", "prompt")


@pytest.mark.parametrize("salt", ["", 5, b"s", "x" * 129, "x" * 10_000, ["s"], True])
def test_kvc_03_salts_of_the_wrong_kind(salt):
    """Pinned: an empty, overlong or non-string salt is refused."""
    refused({"prompt_token_ids": [1], "cache_salt": salt}, "cache_salt must be a string", "cache_salt")


def test_the_longest_salt():
    (seq,) = process({"prompt_token_ids": [1], "cache_salt": "x" * 128})
    assert seq.request.cache_salt == "x" * 128
    (seq,) = process({"prompt_token_ids": [1], "cache_salt": None})
    assert seq.request.cache_salt is None


@pytest.mark.parametrize("priority", [1.0, "1", None, True])
def test_priorities_are_integers(priority):
    refused([1], "priority must be an integer", "priority", priority=priority)


def test_prompts_longer_than_the_context_or_the_pool():
    wide = Limits(vocab_size=320, max_model_len=16, max_cached_tokens=100, num_blocks=25, block_size=4)
    processor = InputProcessor(None, wide, 1, ())
    params = SamplingParams(detokenize=False)
    assert processor.process("r", range(15), params)[0].max_tokens == 1
    with pytest.raises(RequestError, match="16 tokens, but the context is 16"):
        processor.process("r", range(16), params)
    refused(range(12), "needs 4 blocks of 4, but the KV cache has only 3", "prompt")
    assert process(range(11))[0].max_tokens == 1


def test_prompts_that_are_only_scored_may_fill_everything():
    params = SamplingParams(detokenize=False, max_tokens=0)
    assert process(range(12), params)[0].max_tokens == 0
    refused(range(13), "blocks", "prompt", params)


def test_max_tokens_is_cut_to_the_room():
    for given, expected in ((None, 8), (3, 3), (100, 8)):
        assert process(range(4), SamplingParams(detokenize=False, max_tokens=given))[0].max_tokens == expected


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"logit_bias": {320: 1}}, "logit_bias"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"logprob_token_ids": [320]}, "logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[320]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[1]] * 17}, "prompt_logprob_token_ids"),
        ({"allowed_token_ids": [257, 258], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_parameters_that_do_not_fit_the_model_name_the_field(values, param):
    refused([1], param, param, SamplingParams(detokenize=False, **values))


def test_text_parameters_need_a_tokenizer():
    refused([1], "no tokenizer", "detokenize", SamplingParams())
    refused([1], "no tokenizer", "bad_words", SamplingParams(detokenize=False, bad_words=["a"]))


def test_choices_share_one_request_and_have_their_own_streams():
    sequences = process([1, 2], SamplingParams(detokenize=False, n=3, seed=5))
    assert [seq.index for seq in sequences] == [0, 1, 2]
    assert len({id(seq.request) for seq in sequences}) == 1
    assert len({seq.key for seq in sequences}) == 3
    assert [seq.parent for seq in sequences] == [None, sequences[0], sequences[0]]
    assert [seq.order for seq in sequences] == sorted(seq.order for seq in sequences)


def test_long_bad_words_make_a_sequence_wait_for_its_history():
    params = SamplingParams(bad_words=["ab"])
    assert process([1], params, tokenizer=TEXT)[0].constraint is not None
    # with its leading space, a word of one letter has two tokens
    assert process([1], SamplingParams(bad_words=["a"]), tokenizer=TEXT)[0].constraint is not None
    literal = ByteTokenizer(literals=(" cat", "cat"))
    assert process([1], SamplingParams(bad_words=["cat"]), tokenizer=literal)[0].constraint is None
