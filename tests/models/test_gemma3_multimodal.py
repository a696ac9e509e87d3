"""The language model inside an image and text checkpoint of Gemma 3."""

import json

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from model_driver import Chunk, ModelDriver, assemble
from safetensors.numpy import load_file
from tiny_checkpoints import CASES, COMMON, fill, prompt, reference_logits

from jaxinfer.models.registry import family, parse_config

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}


def test_text_logits_equal_transformers(tmp_path):
    config = transformers.Gemma3Config(
        text_config={**COMMON, **CASES["gemma3"][1]},
        vision_config=VISION,
        mm_tokens_per_image=4,
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    fill(model.model.language_model, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)

    ours = parse_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = load_file(tmp_path / "model.safetensors")
    weights = family(ours.architecture).weight_map(ours)
    driver = ModelDriver(ours, {path: assemble(source, tensors) for path, source in weights.items()})
    tokens = prompt(15)
    actual = driver.step([Chunk(0, 0, tokens)], 16)
    np.testing.assert_allclose(actual, reference_logits(model, tokens), atol=2e-4)
    assert actual.dtype == jnp.float32
