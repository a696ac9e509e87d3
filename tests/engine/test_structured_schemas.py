"""Every finished answer of a random model validates against its schema."""

import json
from typing import Any

import jsonschema
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.structured.schemas import SCHEMAS
from tests.support.engines import Job, config, context_script, run, scripted
from tests.support.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer(literals=('{"', '":', '",', "},", "true", "fal", "  ", "\n", "10", "ü", "开"))
END = {ord('"'): 3.0, ord("}"): 3.0, ord("]"): 3.0, 257: 33.0}
"""Logit bias: random texts would be long."""


def engine(overlap: int = 1, jump_ahead: bool = True, num_blocks: int = 600, **scheduler: Any):
    settings = config(overlap=overlap, num_blocks=num_blocks, **scheduler)
    structured = settings.structured.model_copy(update={"jump_ahead": jump_ahead})
    settings = settings.model_copy(update={"structured": structured})
    return scripted(context_script(), settings, tokenizer=TOKENIZER, max_model_len=512)


def params(schema: Any, seed: int, **more: Any) -> SamplingParams:
    spec = {"json": schema, "disable_any_whitespace": seed % 2 == 0}
    return SamplingParams(structured_outputs=spec, seed=seed, max_tokens=400, logit_bias=END, **more)


def validate(text: str, schema: Any) -> None:
    jsonschema.validate(
        json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


@pytest.mark.feature("structured output", "sampling", "seeds", "n > 1", "bias, allowed ids, bad words")
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_a_random_model_validate(name):
    """Eight answers, with and without whitespace; most of them end, and those that do are right."""
    schema = SCHEMAS[name]
    outputs = run(engine(), [Job("answer", params(schema, seed, n=2)) for seed in range(4)], check=False)
    finished = [c for output in outputs for c in output.outputs if c.finish_reason == "stop"]
    assert len(finished) >= 6
    assert not any(output.error for output in outputs)
    for choice in finished:
        validate(choice.text, schema)


@pytest.mark.feature("structured output", "overlap")
@pytest.mark.parametrize("name", ["object", "enum-unicode", "ref-recursive-tree", "one-of-disjoint", "uuid"])
def test_jump_ahead_changes_neither_validity_nor_what_was_free(name):
    """With tokens of one byte there is one way to spell a text, so the answers are the same ones."""
    schema, answers = SCHEMAS[name], {}
    jobs = [Job("answer", params(schema, seed)) for seed in range(0, 12, 2)]
    for overlap in (0, 1):
        for jump in (False, True):
            outputs = run(engine(overlap, jump), jobs)
            answers[overlap, jump] = [output.outputs[0].text for output in outputs]
            for output in outputs:
                assert output.outputs[0].finish_reason == "stop"
                validate(output.outputs[0].text, schema)
    assert answers[0, False] == answers[1, False]
    assert answers[0, True] == answers[1, True]


@pytest.mark.feature("structured output", "preemption", "chunked prefill", "continuous batching")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("jump_ahead", [False, True])
def test_answers_do_not_depend_on_the_schedule(overlap, jump_ahead):
    """Ten requests that preempt each other, in chunks of 5, give what each gives alone."""
    names = ["object", "object-optional", "tuple", "nested", "ref"] * 2
    jobs = [Job(f"prompt number {i}", params(SCHEMAS[name], i)) for i, name in enumerate(names)]
    alone = [run(engine(overlap, jump_ahead), [job])[0].outputs[0] for job in jobs]
    crowd = engine(overlap, jump_ahead, num_blocks=24, chunk_size=5)
    together = [output.outputs[0] for output in run(crowd, jobs)]
    assert crowd.core.stats.preemptions > 0
    assert [c.text for c in together] == [c.text for c in alone]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]
    for choice, name in zip(together, names, strict=True):
        if choice.finish_reason == "stop":
            validate(choice.text, SCHEMAS[name])
