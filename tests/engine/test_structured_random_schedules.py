"""Random mixes of forms, budgets, plain requests and aborts under pressure; integrity is checked after every step."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_structured_schemas import END, TOKENIZER, validate
from tests.structured.schemas import SCHEMAS
from tests.support.engines import Driver, config, context_script, run, scripted
from tests.support.engines import Job as Request

NAMES = ["object", "enum-unicode", "integer-range", "tuple", "ref-recursive-list", "boolean", "date"]


def make(overlap: int, jump_ahead: bool, num_blocks: int, **scheduler: Any):
    settings = config(overlap=overlap, num_blocks=num_blocks, **scheduler)
    structured = settings.structured.model_copy(update={"jump_ahead": jump_ahead})
    return scripted(
        context_script(),
        settings.model_copy(update={"structured": structured}),
        tokenizer=TOKENIZER,
        max_model_len=120,
    )


def random_params(rng: np.random.Generator, seed: int) -> tuple[SamplingParams, str | None]:
    """A request, and the name of its schema if it has one."""
    common: dict[str, Any] = {"seed": seed, "max_tokens": int(rng.integers(1, 60)), "logit_bias": END}
    name = str(rng.choice(NAMES))
    form = {"json": SCHEMAS[name], "disable_any_whitespace": bool(rng.integers(2))}
    match int(rng.integers(7)):
        case 0 | 1:
            return SamplingParams(**common, ignore_eos=True), None
        case 2:
            return SamplingParams(**common, bad_words=["ab", "true"]), None
        case 3:
            return SamplingParams(**common, structured_outputs=form, n=2), name
        case 4:
            return SamplingParams(**common, structured_outputs=form, logprobs=1, presence_penalty=0.5), name
        case 5:
            return SamplingParams(**common, structured_outputs=form, min_tokens=1, stop=["zzz"]), name
    return SamplingParams(**common, structured_outputs=form, thinking_token_budget=5), name


@pytest.mark.feature("structured output", "preemption", "chunked prefill", "overlap", "abort", "n > 1")
@pytest.mark.parametrize("seed", range(6))
def test_random_mixes(seed: int) -> None:
    """Half of the requests that are not aborted are compared with a run alone, without pressure."""
    rng = np.random.default_rng(seed)
    overlap, jump = seed % 2, bool(seed // 2 % 2)
    options = {"chunk_size": int(rng.integers(3, 20)), "policy": str(rng.choice(["fcfs", "priority"]))}
    driver = Driver(make(overlap, jump, num_blocks=40, **options))
    jobs = {f"r{i}": random_params(rng, i) for i in range(14)}
    prompts = {name: "x" * int(rng.integers(1, 30)) for name in jobs}
    aborted = set()
    for name, (params, _) in jobs.items():
        driver.add(name, prompts[name], params, priority=int(rng.integers(3)))
        driver.step(int(rng.integers(4)))
        if rng.random() < 0.15:
            driver.abort(name)
            aborted.add(name)
    driver.drain()
    for i, (name, (params, schema)) in enumerate(jobs.items()):
        output = driver.output(name)
        assert output.finished
        assert output.error is None
        for choice in output.outputs:
            if schema is not None and choice.finish_reason == "stop":
                validate(choice.text, SCHEMAS[schema])
        if name not in aborted and i % 2:
            alone = run(make(0, jump, num_blocks=300), [Request(prompts[name], params, request_id=name)])[0]
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
            assert [c.text for c in output.outputs] == [c.text for c in alone.outputs]
