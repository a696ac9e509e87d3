"""Forms of answers with the default model."""

import json

import jsonschema
import pytest

from jaxinfer import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.engine.test_real_model_smollm2 import find_model
from tests.structured.schemas import SCHEMAS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.feature("structured output", "Llama", "GGUF"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        find_model(),
        max_model_len=1024,
        memory="512MiB",
        max_num_batched_tokens=256,
        compile={"warm_up": "lazy", "layers_per_segment": 5},
    )


@pytest.mark.feature("sampling", "seeds", "continuous batching")
def test_answers_to_all_schemas_validate(llm: LLM) -> None:
    """All schemas in one batch, with jump-ahead; an answer that does not end within 200 tokens is not counted."""
    prompts, params = [], []
    for seed, (name, schema) in enumerate(SCHEMAS.items()):
        prompts.append(
            f"<|im_start|>user\nWrite a short JSON value: {name}.<|im_end|>\n<|im_start|>assistant\n"
        )
        form = {"json": schema, "disable_any_whitespace": seed % 2 == 0}
        params.append(SamplingParams(seed=seed, temperature=0.7, max_tokens=200, structured_outputs=form))
    outputs = llm.generate(prompts, params, progress=False)
    finished = 0
    for output, (name, schema) in zip(outputs, SCHEMAS.items(), strict=True):
        (choice,) = output.outputs
        assert choice.finish_reason in ("stop", "length"), (name, output.error)
        if choice.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(choice.text), schema)
    assert finished >= 40


@pytest.mark.feature("greedy", "logprobs")
def test_a_grammar_leads_to_what_is_most_likely_among_what_is_allowed(llm: LLM) -> None:
    """With log-probabilities, so every token is sampled: the answer of the model, told what the choices are."""
    prompt = (
        "<|im_start|>user\nWhat is the capital of France? Answer with one word.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    form = {"choice": ["Berlin", "Paris", "Rome"]}
    (output,) = llm.generate(
        prompt, SamplingParams(temperature=0, structured_outputs=form, logprobs=0), progress=False
    )
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason) == ("Paris", "stop")
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
