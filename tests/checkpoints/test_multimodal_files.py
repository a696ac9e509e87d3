"""The text model inside an image and text checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tiny_llama_files import SIZES, TOKENS, hf_logits, our_logits

from jaxinfer.checkpoints.errors import CheckpointError

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture
def saved(tmp_path) -> tuple[Path, np.ndarray]:
    """A tiny Gemma 3 checkpoint with a vision tower, and the logits of its text model."""
    config = transformers.Gemma3Config(
        text_config={**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for weight in model.model.language_model.parameters():
            weight.copy_(torch.randn(weight.shape) / 8)
    model.save_pretrained(tmp_path)
    return tmp_path, hf_logits(model, TOKENS)


def rename(folder: Path, old: str, new: str) -> None:
    weights = load_file(folder / "model.safetensors")
    assert any(name.startswith(old) for name in weights)
    renamed = {
        new + name.removeprefix(old) if name.startswith(old) else name: array
        for name, array in weights.items()
    }
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_prefixes(saved, prefix):
    folder, expected = saved
    rename(folder, "language_model.model.", prefix)
    np.testing.assert_allclose(our_logits(folder), expected, atol=3e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_lod_01_tie_flag_only_in_the_nested_configuration(saved, tied):
    folder, expected = saved
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    if tied:
        np.testing.assert_allclose(our_logits(folder), expected, atol=3e-4)
    else:
        with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing"):
            our_logits(folder)
