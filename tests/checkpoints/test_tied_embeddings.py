"""LOD-01: the configuration decides about tied embeddings, and every parameter comes from the checkpoint."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_llama_files import SIZES, abstract, hf_logits, load, make_model, our_logits

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.loader import load_params
from jaxinfer.checkpoints.model_files import open_model
from jaxinfer.models.registry import family, parse_config

TOLERANCE = 1e-4


def save(folder: Path, tied: bool) -> np.ndarray:
    """Writes a checkpoint; returns the reference logits."""
    model = make_model(tie_word_embeddings=tied)
    model.save_pretrained(folder)
    return hf_logits(model)


def edit(folder: Path, config: dict | None = None, drop: tuple[str, ...] = (), **tensors: np.ndarray) -> None:
    """Changes keys of the configuration (None removes one), drops tensors, adds others ("__" for ".")."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if name not in drop}
    weights |= {name.replace("__", "."): weight for name, weight in tensors.items()}
    save_file(weights, folder / "model.safetensors")


def embedding(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_lod_01_tied_without_head(tmp_path):
    expected = save(tmp_path, tied=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)


def test_lod_01_tied_with_equal_head(tmp_path, caplog):
    expected = save(tmp_path, tied=True)
    edit(tmp_path, lm_head__weight=embedding(tmp_path).copy())
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)
    assert "differs" not in caplog.text


@pytest.mark.parametrize("rows", [320, 384])
def test_lod_01_tied_with_different_head(tmp_path, caplog, rows):
    """Pinned: the configuration wins, the head is not used, and a warning says so."""
    expected = save(tmp_path, tied=True)
    edit(tmp_path, lm_head__weight=np.ones((rows, 64), np.float32))
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)
    assert "'lm_head.weight' differs from the embedding" in caplog.text
    assert "model.safetensors" in caplog.text


def test_lod_01_untied_with_head(tmp_path):
    expected = save(tmp_path, tied=False)
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)


def test_lod_01_untied_without_head(tmp_path):
    save(tmp_path, tied=False)
    edit(tmp_path, drop=("lm_head.weight",))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing in .*model\.safetensors"):
        load(open_model(tmp_path))


def test_lod_01_flag_absent(tmp_path):
    """Pinned: an absent flag has the family's default; Llama's is untied, so the head is needed."""
    expected = save(tmp_path, tied=False)
    edit(tmp_path, config={"tie_word_embeddings": None})
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)
    edit(tmp_path, drop=("lm_head.weight",))
    with pytest.raises(CheckpointError, match="lm_head"):
        load(open_model(tmp_path))


@pytest.mark.parametrize(
    "head", ["language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight"]
)
def test_lod_01_head_under_a_prefix(tmp_path, head):
    expected = save(tmp_path, tied=False)
    weight = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    edit(tmp_path, drop=("lm_head.weight",), **{head.replace(".", "__"): weight.copy()})
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)


def test_lod_01_padded_rows(tmp_path, caplog):
    """Pinned: rows of an embedding or head beyond the vocabulary are dropped, with a warning."""
    expected = save(tmp_path, tied=False)
    weights = load_file(tmp_path / "model.safetensors")
    pad = np.full((64, 64), 9.0, np.float32)
    padded = {
        name: np.concatenate([weights[name], pad]) for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    edit(tmp_path, **{name.replace(".", "__"): weight for name, weight in padded.items()})
    np.testing.assert_allclose(our_logits(tmp_path), expected, atol=TOLERANCE)
    assert "beyond the vocabulary are dropped" in caplog.text


def test_lod_01_too_few_rows(tmp_path):
    save(tmp_path, tied=False)
    edit(tmp_path, lm_head__weight=np.zeros((319, 64), np.float32))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has shape \[320, 64\].*\[319, 64\]"):
        load(open_model(tmp_path))


def test_lod_01_no_parameter_keeps_its_initial_value(tmp_path):
    """Parameters that start as NaN are all finite after loading, and there are as many as the model has."""
    save(tmp_path, tied=False)
    files = open_model(tmp_path)
    model = abstract(files)
    filled = {path: np.full(s.shape, np.nan, s.dtype) for path, s in model.shapes.items()}
    config = parse_config(files.config)

    def place(path: str, array: np.ndarray) -> jnp.ndarray:
        filled[path][...] = array
        return jnp.asarray(array)

    load_params(model.shapes, family(config.architecture).weight_map(config), files.source, place)
    assert not [path for path, array in filled.items() if not np.isfinite(array).all()]
    assert SIZES["num_hidden_layers"] * 6 + 3 == len(filled)
