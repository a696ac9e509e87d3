"""Forms of answers together with everything else that a request can ask for."""

import json
from typing import Any

import numpy as np
import pytest

from jaxinfer.request import RequestError
from jaxinfer.runner.protocol import Masks
from jaxinfer.runner.scripted import ScriptedRunner
from jaxinfer.sampling.masks import is_empty
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduler.plan import StepPlan
from tests.engine.test_structured_schemas import validate
from tests.structured.schemas import SCHEMAS
from tests.support.engines import (
    EOS,
    VOCAB,
    Driver,
    Job,
    build,
    config,
    context_script,
    ids,
    one_hot,
    run,
    scripted,
    simulated,
    static_script,
)
from tests.support.tiny_models import prompt_ids, tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer, SpmTokenizer

pytestmark = pytest.mark.feature("structured output")

TOKENIZER = ByteTokenizer(literals=("<think>", "</think>", "EFG"))
THINK, END_THINK = 264, 265
OBJECT = SCHEMAS["object"]


def engine(script=None, *, jump_ahead: bool = True, record: list[StepPlan] | None = None, **settings: Any):
    values = config(num_blocks=400, **settings)
    structured = values.structured.model_copy(update={"jump_ahead": jump_ahead})
    values = values.model_copy(update={"structured": structured})
    return scripted(script or context_script(), values, tokenizer=TOKENIZER, max_model_len=400, record=record)


def generate(script=None, *, prompt: str = "abc", overlap: int = 1, jump_ahead: bool = True, **params: Any):
    values = {"temperature": 0.0, "max_tokens": 60, **params}
    made = engine(script, overlap=overlap, jump_ahead=jump_ahead)
    (output,) = run(made, [Job(prompt, SamplingParams(**values))])
    return output.outputs[0], output.error


def prefers(text: str, start: int = 3):
    """Logits that prefer a text, then EOS."""
    data = [*text.encode(), EOS[0]]

    def script(request, index, position):
        return one_hot(data[min(position - start, len(data) - 1)])

    return script


both_depths = pytest.mark.parametrize("overlap", [0, 1])
both_jumps = pytest.mark.parametrize("jump_ahead", [False, True])


# ---- STR-03 and STR-04 with a request


@pytest.mark.feature("tokenizer", "overlap")
@both_depths
@both_jumps
@pytest.mark.parametrize("choice", ["开心", "naïve", "😀", 'a"b\\c\nd'])
def test_str_03_answers_hold_the_raw_text(overlap, jump_ahead, choice):
    schema = {
        "type": "object",
        "properties": {"心情": {"const": choice}},
        "required": ["心情"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        spec = {"json": given, "disable_any_whitespace": True}
        answer, _ = generate(overlap=overlap, jump_ahead=jump_ahead, structured_outputs=spec, max_tokens=100)
        assert json.loads(answer.text) == {"心情": choice}
        assert answer.finish_reason == "stop"
        if "\n" not in choice:
            assert answer.text == '{"心情":"' + choice + '"}'
            assert answer.token_ids == TOKENIZER.encode(answer.text)


def test_str_03_a_free_string_keeps_its_umlauts():
    answer, _ = generate(prefers('"größte"'), structured_outputs={"json": {"type": "string"}})
    assert answer.text == '"größte"'


@pytest.mark.feature("tokenizer")
@both_jumps
def test_str_03_pieces_with_a_space_mark(jump_ahead):
    tokenizer = SpmTokenizer(pieces=("_cat", "_sat", "开心", "{", "}", '"', "_"))
    settings = config(num_blocks=200)
    structured = settings.structured.model_copy(update={"jump_ahead": jump_ahead})
    made = scripted(
        context_script(),
        settings.model_copy(update={"structured": structured}),
        tokenizer=tokenizer,
        eos=(2,),
        max_model_len=200,
    )
    schema = {"enum": [{"a cat": "开心"}, {"a cat": "the cat sat"}]}
    jobs = [
        Job("_cat", SamplingParams(seed=i, max_tokens=100, structured_outputs={"json": schema}))
        for i in range(6)
    ]
    answers = [json.loads(output.outputs[0].text) for output in run(made, jobs)]
    assert all(answer in schema["enum"] for answer in answers)
    assert len({json.dumps(a) for a in answers}) == 2


@pytest.mark.parametrize("value", [42, -0.5, True, None, "", [1, "a"], {"a": [None]}])
@both_jumps
def test_str_04_the_answer_is_the_constant(value, jump_ahead):
    answer, _ = generate(jump_ahead=jump_ahead, structured_outputs={"json": {"const": value}})
    assert json.loads(answer.text) == value
    assert answer.finish_reason == "stop"


# ---- STR-07: what happens when bans leave nothing


FORCED = [
    {"json": {"type": "boolean"}},
    {"json": {"type": "null"}},
    {"json": {"enum": ["a"]}},
    {"choice": ["yes", "no"]},
    {"regex": "[ab]{3}"},
]


@both_depths
@both_jumps
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("spec", FORCED, ids=str)
def test_str_07_a_complete_answer_ends_in_spite_of_min_tokens(overlap, jump_ahead, ignore_eos, spec):
    """Pinned: the form wins. The answer ends with ``stop`` when nothing can follow."""
    answer, error = generate(
        overlap=overlap, jump_ahead=jump_ahead, structured_outputs=spec, min_tokens=20, ignore_eos=ignore_eos
    )
    assert (answer.finish_reason, answer.stop_reason, error) == ("stop", None, None)
    assert answer.text in ("true", "false", "null", '"a"', "yes", "no") or len(answer.text) == 3


@both_depths
def test_str_07_min_tokens_keeps_an_answer_going_that_can_go_on(overlap):
    """An answer that may end, or go on, goes on until there are enough tokens; an end token ends it even if the
    request ignores end tokens."""
    script = static_script({EOS[0]: 9.0, 97: 3.0})
    for ignore_eos in (False, True):
        answer, _ = generate(
            script, overlap=overlap, structured_outputs={"regex": "a*"}, min_tokens=5, ignore_eos=ignore_eos
        )
        assert (answer.text, answer.finish_reason) == ("aaaaa", "stop")


@both_depths
@pytest.mark.parametrize(
    "bans",
    [
        {"bad_words": ["t", "f"]},
        {"allowed_token_ids": [65, 66]},
        {"bad_words": ["tr", "fa"]},
        {"allowed_token_ids": [ord(c) for c in "trufals"]},
    ],
    ids=str,
)
def test_str_07_bans_that_leave_nothing_end_the_request_with_an_error(overlap, bans):
    """Also in the middle of the answer. Neighbours do not notice."""
    params = SamplingParams(temperature=0, structured_outputs={"json": {"type": "boolean"}}, **bans)
    neighbour = SamplingParams(temperature=0.8, seed=3, max_tokens=12, detokenize=False)
    wanted = run(engine(overlap=overlap), [Job("neighbour", neighbour)])[0].outputs[0].token_ids
    outputs = run(engine(overlap=overlap), [Job("abc", params), Job("neighbour", neighbour)])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].error is not None
    assert outputs[0].error.startswith("all tokens are banned")
    assert outputs[1].outputs[0].token_ids == wanted


def test_str_07_bans_that_only_hit_the_end_stop_the_answer():
    """``yes`` is a whole answer; what could follow, and EOS, are banned."""
    answer, error = generate(
        prefers("yes"),
        structured_outputs={"choice": ["yes", "yes!"]},
        allowed_token_ids=[ord(c) for c in "yes"],
    )
    assert (answer.text, answer.finish_reason, error) == ("yes", "stop", None)


def test_str_07_a_bias_does_not_ban():
    bias = {ord(c): -100.0 for c in "truefals"}
    answer, _ = generate(structured_outputs={"json": {"type": "boolean"}}, logit_bias=bias)
    assert answer.text in ("true", "false")


@both_depths
@both_jumps
@pytest.mark.parametrize("include", [False, True])
def test_str_07_a_stop_string_inside_forced_text(overlap, jump_ahead, include):
    """Pinned: it ends the answer there, as it would end any text."""
    answer, _ = generate(
        overlap=overlap,
        jump_ahead=jump_ahead,
        structured_outputs={"choice": ["one two three"]},
        stop=["two"],
        include_stop_str_in_output=include,
    )
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "two")
    assert answer.text == ("one two" if include else "one ")


@both_depths
def test_str_07_stop_strings_before_min_tokens_are_ignored(overlap):
    answer, _ = generate(prefers("a\nb\nc"), overlap=overlap, stop=["\n"], min_tokens=3)
    assert (answer.text, answer.stop_reason) == ("a\nb", "\n")


def test_str_07_no_empty_mask_reaches_the_sampler(monkeypatch):
    """All of the above in one batch, with a look at every mask."""
    seen: list[np.ndarray] = []
    original = ScriptedRunner.begin

    def begin(self, plan, arrays):
        begun = original(self, plan, arrays)

        class Watched:
            def sample(self, masks: Masks):
                seen.extend(masks.values())
                return begun.sample(masks)

        return Watched()

    monkeypatch.setattr(ScriptedRunner, "begin", begin)
    jobs = [
        Job("x", SamplingParams(structured_outputs=spec, seed=i, **bans))
        for i, (spec, bans) in enumerate(
            (spec, bans)
            for spec in FORCED
            for bans in ({"min_tokens": 9}, {"bad_words": ["t", "f", "n", "y"]}, {"allowed_token_ids": [97]})
        )
    ]
    outputs = run(engine(), jobs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "error"}
    assert seen
    assert not any(is_empty(mask, VOCAB) for mask in seen)


# ---- composition


@pytest.mark.feature("logprobs", "overlap")
@both_depths
def test_logprobs_of_every_token(overlap):
    """Nothing is appended unsampled: every token has its log-probability, forced ones under the law included."""
    answer, _ = generate(
        overlap=overlap,
        temperature=1.0,
        seed=1,
        structured_outputs={"json": SCHEMAS["object-unicode"]},
        logprobs=2,
        logprobs_mode="processed",
    )
    validate(answer.text, SCHEMAS["object-unicode"])
    assert len(answer.logprobs) == len(answer.token_ids)
    certain = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert sum(value == pytest.approx(0, abs=1e-6) for value in certain) > 10
    assert min(certain) < -0.1


@pytest.mark.feature("penalties")
@both_depths
def test_penalties_count_forced_tokens(overlap):
    answer, _ = generate(
        static_script({97: 3.0, 98: 2.9, 99: 2.8}),
        overlap=overlap,
        structured_outputs={"regex": "aaa[abc]{4}"},
        frequency_penalty=1.0,
    )
    assert answer.text.startswith("aaab")


@pytest.mark.feature("n > 1", "sampling", "seeds")
@both_depths
@both_jumps
def test_choices_have_their_own_state(overlap, jump_ahead):
    made = engine(overlap=overlap, jump_ahead=jump_ahead)
    params = SamplingParams(n=4, seed=5, max_tokens=60, structured_outputs={"json": OBJECT})
    (output,) = run(made, [Job("some prompt", params)])
    texts = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert len(set(texts)) > 1
    for text in texts:
        validate(text, OBJECT)


@pytest.mark.feature("stop strings and ids")
@both_jumps
def test_max_tokens_cuts_forced_text(jump_ahead):
    answer, _ = generate(jump_ahead=jump_ahead, structured_outputs={"choice": ["abcdefgh"]}, max_tokens=5)
    assert (answer.text, answer.finish_reason) == ("abcde", "length")
    answer, _ = generate(jump_ahead=jump_ahead, structured_outputs={"choice": ["abcde"]}, max_tokens=5)
    assert (answer.text, answer.finish_reason) == ("abcde", "stop")


def test_stop_token_ids_end_an_answer_where_they_are_allowed():
    answer, _ = generate(static_script({97: 1.0}), structured_outputs={"regex": "ab+"}, stop_token_ids=[98])
    assert (answer.text, answer.stop_reason) == ("a", 98)


@pytest.mark.feature("prefix cache", "chunked prefill")
@both_depths
@both_jumps
def test_jumps_reach_over_blocks_and_prefix_hits(overlap, jump_ahead):
    """The forced text is longer than several blocks and than a chunk; the second request finds the first one's."""
    text = "the quick brown fox jumps over the lazy dog"
    made = engine(overlap=overlap, jump_ahead=jump_ahead, chunk_size=7)
    params = SamplingParams(structured_outputs={"regex": text + "[a-z]{3}"}, max_tokens=100, seed=2)
    first = run(made, [Job("the prompt is here", params)])[0]
    second = run(made, [Job("the prompt is here" + text, params)])[0]
    assert first.outputs[0].text[:-3] == text
    assert second.num_cached_tokens >= 56
    assert second.outputs[0].text[:-3] == text


def test_jump_ahead_saves_steps():
    lengths = {}
    for jump in (False, True):
        record: list[StepPlan] = []
        spec = {"choice": ["the quick brown fox jumps over the lazy dog"]}
        run(
            engine(jump_ahead=jump, record=record),
            [Job("abc", SamplingParams(structured_outputs=spec, max_tokens=99))],
        )
        lengths[jump] = len(record)
    assert lengths[False] >= 43
    assert lengths[True] <= 2


@pytest.mark.feature("abort")
@both_depths
def test_an_abort_in_the_middle(overlap):
    driver = Driver(engine(overlap=overlap, jump_ahead=False))
    driver.add("a", "abc", SamplingParams(structured_outputs={"json": OBJECT}, max_tokens=50))
    driver.add("b", "abc", SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=50))
    driver.step(2)
    driver.abort("a")
    driver.drain()
    assert driver.finishes("a") == ["abort"]
    assert driver.finishes("b") == ["stop"]


# ---- neighbours


PLAIN = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, detokenize=False) for i in range(2)]


@pytest.mark.feature("continuous batching", "overlap", "seeds")
@both_depths
@both_jumps
def test_a_grammar_neither_changes_nor_delays_its_neighbours(overlap, jump_ahead):
    """The plain requests give the same tokens, one in each step, with and without two neighbours that have a form."""

    def tokens_by_step(with_forms: bool) -> list[list[tuple[str | int, ...]]]:
        driver = Driver(engine(overlap=overlap, jump_ahead=jump_ahead))
        for i, params in enumerate(PLAIN):
            driver.add(f"plain{i}", f"prompt {i}", params)
        if with_forms:
            for i in range(2):
                spec = {"json": OBJECT}
                driver.add(f"form{i}", "json", SamplingParams(seed=i, max_tokens=40, structured_outputs=spec))
        steps = []
        while driver.engine.core.has_work:
            news = driver.step()
            steps.append([(d.request_id, *d.token_ids) for d in news if d.request_id.startswith("plain")])
        return steps

    alone, crowd = tokens_by_step(False), tokens_by_step(True)
    assert crowd[: len(alone)] == alone


@pytest.mark.feature("bias, allowed ids, bad words", "overlap")
def test_bad_words_of_several_tokens_decode_in_every_step():
    record: list[StepPlan] = []
    params = SamplingParams(temperature=0, max_tokens=20, bad_words=["AB"], ignore_eos=True)
    run(engine(static_script({65: 2.0, 66: 3.0}), record=record), [Job("abc", params)])
    assert len(record) <= 22


# ---- reasoning


CHOICE = {"choice": ["yes", "no"], "after_reasoning": True}


def thinking(text: str, opened: bool = False):
    """Logits of a model that thinks this, and answers ``no``."""
    data = [*([] if opened else [THINK]), *text.encode(), END_THINK, *b"no", EOS[0]]

    def script(request, index, position):
        at = position - len(request.prompt_token_ids)
        return one_hot(data[min(at, len(data) - 1)])

    return script


@pytest.mark.feature("reasoning", "overlap")
@both_depths
@both_jumps
@pytest.mark.parametrize("opened", [False, True])
def test_a_form_begins_behind_the_reasoning(overlap, jump_ahead, opened):
    answer, _ = generate(
        thinking("hm, yes?", opened),
        prompt="abc<think>\n" if opened else "abc",
        overlap=overlap,
        jump_ahead=jump_ahead,
        structured_outputs=CHOICE,
    )
    assert answer.text == ("" if opened else "<think>") + "hm, yes?</think>no"
    assert answer.finish_reason == "stop"


@pytest.mark.feature("reasoning")
@pytest.mark.parametrize("prompt", ["abc", "abc<think>\n\n</think>\n\n"])
def test_a_model_that_does_not_think_keeps_to_the_form(prompt):
    """Neither where the prompt closes the reasoning at once, nor where the model does not open it."""
    answer, _ = generate(static_script({120: 9.0, 110: 5.0}), prompt=prompt, structured_outputs=CHOICE)
    assert answer.text == "no"


@pytest.mark.feature("reasoning", "overlap")
@both_depths
@both_jumps
@pytest.mark.parametrize("budget", [0, 3, 8, 50])
@pytest.mark.parametrize("form", [None, CHOICE])
def test_a_budget_ends_the_reasoning(overlap, jump_ahead, budget, form):
    """Pinned: the budget counts tokens between the markers; 8 is what the model takes, and more has no effect."""
    text = "hm, yes?"
    answer, _ = generate(
        thinking(text),
        overlap=overlap,
        jump_ahead=jump_ahead,
        structured_outputs=form,
        thinking_token_budget=budget,
    )
    thought, _, rest = answer.text.removeprefix("<think>").partition("</think>")
    assert thought == text[:budget]
    if form is not None:
        assert rest in ("yes", "no")
    elif budget >= 8:
        assert rest == "no"


@pytest.mark.feature("reasoning")
@both_jumps
def test_markers_that_are_not_tokens(jump_ahead):
    """The markers are found in bytes, and the end is forced byte by byte."""
    plain = ByteTokenizer()
    made = scripted(static_script({120: 5.0}), config(num_blocks=200), tokenizer=plain, max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=4, structured_outputs=CHOICE)
    (output,) = run(made, [Job("abc<think>", params)])
    assert output.outputs[0].text in ("xxxx</think>yes", "xxxx</think>no")


@pytest.mark.feature("reasoning")
def test_a_budget_without_reasoning_has_no_effect():
    answer, _ = generate(prefers("plain text"), thinking_token_budget=2)
    assert answer.text == "plain text"


# ---- real and simulated runners


@pytest.mark.feature("Llama", "chunked prefill", "preemption", "overlap", "sampling")
@both_depths
@both_jumps
def test_a_random_model_on_the_device(overlap, jump_ahead):
    """Two phases on the device: tokens in flight are found there, masks come after the layers. In a small pool, with
    chunks, and with a plain neighbour whose tokens stay what they are alone."""

    def make(num_blocks: int):
        settings = tiny_settings(overlap=overlap, num_blocks=num_blocks, chunk_size=6)
        structured = settings.structured.model_copy(update={"jump_ahead": jump_ahead})
        return tiny_model().engine(
            settings.model_copy(update={"structured": structured}), tokenizer=ByteTokenizer()
        )

    names = ["integer-range", "enum-unicode", "string-pattern", "date", "array-bounds", "ref"]
    jobs = [
        Job(
            ids(prompt_ids(9 + i, i)),
            SamplingParams(
                seed=i,
                max_tokens=45,
                structured_outputs={"json": SCHEMAS[name], "disable_any_whitespace": True},
            ),
        )
        for i, name in enumerate(names)
    ]
    plain = Job(ids(prompt_ids(8, 77)), SamplingParams(seed=9, max_tokens=40, detokenize=False))
    alone = [run(make(64), [job])[0].outputs[0] for job in (*jobs, plain)]
    crowd = make(14)
    outputs = [output.outputs[0] for output in run(crowd, [plain, *jobs])]
    assert crowd.core.stats.preemptions > 0
    assert [c.token_ids for c in outputs] == [c.token_ids for c in (alone[-1], *alone[:-1])]
    for name, choice in zip(names, outputs[1:], strict=True):
        assert choice.finish_reason == "stop", name
        validate(choice.text, SCHEMAS[name])


def test_a_simulated_model_keeps_to_the_form():
    made = simulated(config(num_blocks=200), tokenizer=TOKENIZER, max_model_len=200)
    jobs = [
        Job("abc", SamplingParams(structured_outputs=CHOICE | {"after_reasoning": False}, seed=i))
        for i in range(4)
    ]
    assert {output.outputs[0].text for output in run(made, jobs)} <= {"yes", "no"}


# ---- admission


def test_bad_forms_are_refused_before_admission():
    made = engine()
    with pytest.raises(RequestError, match="not") as caught:
        made.inputs.process("a", "abc", SamplingParams(structured_outputs={"json": {"not": {}}}))
    assert caught.value.param == "structured_outputs"
    sequences = made.inputs.process(
        "a", "abc", SamplingParams(structured_outputs={"json": {"not": {}}}), compile_grammars=False
    )
    assert sequences[0].constraint is None
    assert made.grammars is not None


def test_a_model_without_text_has_no_forms():
    made = build(lambda plan: ScriptedRunner(static_script({}), VOCAB, plan), config())
    for params in ({"structured_outputs": {"choice": ["a"]}}, {"thinking_token_budget": 3}):
        with pytest.raises(RequestError, match="no tokenizer"):
            made.inputs.process("a", [1, 2], SamplingParams(detokenize=False, **params))
    assert made.grammars is None
