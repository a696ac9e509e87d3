"""When a generation ends: units, and through the engine."""

import itertools

import pytest

from jaxinfer.engine.stop import StopConditions, repeats
from jaxinfer.request import FinishReason
from jaxinfer.sampling_params import OutputKind, RepetitionDetection, SamplingParams
from tests.support.engines import EOS, Driver, Job, config, ids, run, scripted, sequence_script, token_params
from tests.support.sequences import make_sequence
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("stop strings and ids")


def check(output: list[int], max_tokens: int = 100, **params) -> tuple[FinishReason, int | None] | None:
    seq = make_sequence([1], SamplingParams(detokenize=False, **params), max_tokens=max_tokens)
    seq.output_token_ids = output
    return StopConditions(EOS).check(seq)


def test_end_tokens_and_stop_ids():
    assert check([5]) is None
    for eos in EOS:
        assert check([5, eos]) == (FinishReason.STOP, None)
        assert check([5, eos], ignore_eos=True) is None
    assert check([5], stop_token_ids=[5, 6]) == (FinishReason.STOP, 5)
    assert check([EOS[0]], stop_token_ids=[EOS[0]], ignore_eos=True) == (FinishReason.STOP, EOS[0])


def test_length():
    assert check([5, 5], max_tokens=2) == (FinishReason.LENGTH, None)
    assert check([5, EOS[0]], max_tokens=2) == (FinishReason.STOP, None), "the end token is the better reason"


def test_min_tokens_must_exist_before_the_end():
    assert check([EOS[0]], min_tokens=1) is None
    assert check([5, EOS[0]], min_tokens=1) == (FinishReason.STOP, None)
    assert check([7], min_tokens=1, stop_token_ids=[7]) is None


def test_repetition_detection():
    rule = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=2)
    assert check([1, 2, 3, 1, 2], repetition_detection=rule) is None
    assert check([1, 2, 3, 1, 2, 3], repetition_detection=rule) == (FinishReason.REPETITION, None)
    assert check([9, 1, 2, 1, 2], repetition_detection=rule) == (FinishReason.REPETITION, None)
    assert check([9, 1, 1], repetition_detection=rule) is None, "patterns of one token are not asked for"


def brute_force(tokens: list[int], low: int, high: int, count: int) -> bool:
    for size in range(max(low, 1), high + 1):
        if size * count <= len(tokens):
            pieces = [tokens[len(tokens) - size * (i + 1) : len(tokens) - size * i] for i in range(count)]
            if all(piece == pieces[0] for piece in pieces):
                return True
    return False


def test_repeats_equals_brute_force():

    for length in range(1, 9):
        for tokens in itertools.product((0, 1), repeat=length):
            for low, high, count in ((1, 4, 2), (2, 3, 2), (1, 2, 3), (0, 4, 4)):
                assert repeats(list(tokens), low, high, count) == brute_force(list(tokens), low, high, count)


@pytest.mark.parametrize("overlap", [0, 1])
def test_repetition_ends_a_generation(overlap):
    engine = scripted(sequence_script([9, 7, 8, 7, 8, 7, 8, 5]), config(overlap=overlap))
    params = token_params(max_tokens=20, repetition_detection={"max_pattern_size": 2, "min_count": 3})
    (output,) = run(engine, [Job(ids([1]), params)])
    assert output.outputs[0].finish_reason == "repetition"
    assert output.outputs[0].token_ids == [9, 7, 8, 7, 8, 7, 8]


@pytest.mark.parametrize("overlap", [0, 1])
def test_ignore_eos_and_stop_ids(overlap):
    def tokens(**params) -> tuple[list[int], str | None, int | str | None]:
        engine = scripted(sequence_script([5, 257, 6, 258, 7]), config(overlap=overlap))
        choice = run(engine, [Job(ids([1]), token_params(max_tokens=5, **params))])[0].outputs[0]
        return choice.token_ids, choice.finish_reason, choice.stop_reason

    assert tokens() == ([5], "stop", None)
    assert tokens(include_stop_str_in_output=True) == ([5, 257], "stop", None)
    assert tokens(ignore_eos=True) == ([5, 257, 6, 258, 7], "length", None)
    assert tokens(ignore_eos=True, stop_token_ids=[6]) == ([5, 257], "stop", 6)
    assert tokens(ignore_eos=True, stop_token_ids=[6], include_stop_str_in_output=True) == (
        [5, 257, 6],
        "stop",
        6,
    )
    assert tokens(stop_token_ids=[5]) == ([], "stop", 5)


@pytest.mark.parametrize("overlap", [0, 1])
def test_min_tokens_bans_end_tokens(overlap):
    """The script wants EOS at once: other tokens come until ``min_tokens`` exist, then EOS."""
    engine = scripted(sequence_script([]), config(overlap=overlap))
    params = token_params(max_tokens=10, min_tokens=4, stop_token_ids=[0])
    (output,) = run(engine, [Job(ids([1]), params)])
    assert len(output.outputs[0].token_ids) == 4
    assert not {*EOS, 0} & set(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("overlap", [0, 1])
def test_max_tokens(max_tokens, overlap):
    engine = scripted(sequence_script([5, 6, 7, 8]), config(overlap=overlap))
    (output,) = run(engine, [Job(ids([1, 2]), token_params(max_tokens=max_tokens))])
    assert output.outputs[0].token_ids == [5, 6, 7, 8][:max_tokens]
    assert output.outputs[0].finish_reason == "length"


def test_max_tokens_is_cut_to_the_context_and_to_the_pool():
    script = sequence_script([5] * 100)
    engine = scripted(script, max_model_len=16)
    (output,) = run(engine, [Job(ids(range(10)), token_params(max_tokens=None))])
    assert len(output.outputs[0].token_ids) == 6
    engine = scripted(script, config(num_blocks=4))
    (output,) = run(engine, [Job(ids(range(10)), token_params(max_tokens=50))])
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "length"


# ---- LPB-05

TOKENIZER = ByteTokenizer(literals=(" ha", " b", " c"))
HA, B, C = (TOKENIZER.id_of(t) for t in (" ha", " b", " c"))
SCRIPT = [97, B, HA, HA, HA, C]


def folded(
    engine, params: SamplingParams
) -> tuple[list[int], list[float], str, str | None, int | str | None]:
    """Token ids, logprobs, text and reason of a request; deltas are joined."""
    driver = Driver(engine)
    driver.add("r", ids([1, 2]), params)
    tokens: list[int] = []
    values: list[float] = []
    text, reason, stop_reason = "", None, None
    while engine.core.has_work:
        if driver.step() or not engine.core.has_work:
            for choice in driver.output("r").outputs:
                if params.output_kind is not OutputKind.DELTA:
                    tokens, values, text = [], [], ""
                tokens += choice.token_ids
                text += choice.text
                values += [next(iter(e.values())).logprob for e in choice.logprobs or ()]
                reason, stop_reason = choice.finish_reason, choice.stop_reason
    assert len(tokens) == len(values)
    return tokens, values, text, reason, stop_reason


CASES = {
    "stop id": (SCRIPT, {"stop_token_ids": [C]}, SCRIPT[:5], "a b ha ha ha", 1, " c", C),
    "stop string over tokens": (SCRIPT, {"stop": [" ha ha"]}, SCRIPT[:2], "a b", 2, " ha ha", " ha ha"),
    "stop string inside a token": (SCRIPT, {"stop": ["a h"]}, SCRIPT[:3], "a b h", 1, "a h", "a h"),
    "second end token": ([*SCRIPT[:3], 258, 97], {}, SCRIPT[:3], "a b ha", 1, "", None),
    "first end token": ([*SCRIPT[:3], 257, 97], {}, SCRIPT[:3], "a b ha", 1, "", None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
def test_lpb_05_tokens_logprobs_and_text_are_cut_together(case, include, overlap):
    """Pinned: a token whose text begins before the cut stays, whole, in token_ids and logprobs, though its text may be
    cut (the first ``ha`` of the case "inside a token"); with include_stop the stop token or string is in all three."""
    script, values, kept, text, more, stop_text, stop_reason = CASES[case]
    results = []
    for kind in OutputKind:
        engine = scripted(sequence_script(script), config(overlap=overlap), tokenizer=TOKENIZER)
        params = SamplingParams(
            temperature=0,
            max_tokens=20,
            logprobs=0,
            output_kind=kind,
            include_stop_str_in_output=include,
            **values,
        )
        results.append(folded(engine, params))
    assert results[0] == results[1] == results[2]
    tokens, _, shown, reason, found = results[0]
    assert (reason, found) == ("stop", stop_reason)
    assert tokens == (script[: len(kept) + more] if include else kept)
    assert shown == (text + stop_text if include else text)


@pytest.mark.parametrize("overlap", [0, 1])
def test_stop_strings_are_ignored_before_min_tokens(overlap):
    engine = scripted(sequence_script(SCRIPT), config(overlap=overlap), tokenizer=TOKENIZER)
    params = SamplingParams(temperature=0, max_tokens=20, stop=[" ha"], min_tokens=3)
    (output,) = run(engine, [Job(ids([1]), params)])
    assert output.outputs[0].text == "a b ha"
    assert output.outputs[0].token_ids == SCRIPT[:3]


def test_text_held_back_comes_at_the_end():
    """The output ends by length inside what could have become a stop string."""
    engine = scripted(sequence_script(SCRIPT), tokenizer=TOKENIZER)
    params = SamplingParams(temperature=0, max_tokens=3, stop=[" ha!"], logprobs=0)
    (output,) = run(engine, [Job(ids([1]), params)])
    assert output.outputs[0].text == "a b ha"
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].logprobs or ()) == 3


def test_a_stop_string_at_the_length_limit_is_the_reason():
    engine = scripted(sequence_script(SCRIPT), tokenizer=TOKENIZER)
    params = SamplingParams(temperature=0, max_tokens=3, stop=[" ha"])
    (output,) = run(engine, [Job(ids([1]), params)])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", " ha")
