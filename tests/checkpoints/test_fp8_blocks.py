"""Weights of float8 with a scale for each block: values, shapes that do not fit, and a DeepSeek-V3 in this form."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoints.dtypes import resolve_dtype
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.fp8_blocks import BlockScaledSource, fp8_block_size
from jaxinfer.checkpoints.loader import load_params
from jaxinfer.checkpoints.model_files import open_model
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource
from jaxinfer.models.build import abstract_model
from jaxinfer.models.registry import family, parse_config
from pallas_kernels.select import select_ops
from tests.models.tiny_checkpoints import save

BLOCK = (8, 16)
SPEC = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def quantize(weight_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Float8 values, the factor of each block, and their product."""
    rows, columns = (-(-size // block) for size, block in zip(weight_OI.shape, BLOCK))
    scale = np.zeros((rows, columns), np.float32)
    stored = np.zeros(weight_OI.shape, ml_dtypes.float8_e4m3fn)
    values = np.zeros(weight_OI.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
            scale[i, j] = np.abs(weight_OI[at]).max() / 448
            stored[at] = (weight_OI[at] / scale[i, j]).astype(stored.dtype)
            values[at] = stored[at].astype(np.float32) * scale[i, j]
    return stored, scale, values


def source_of(folder: Path, **tensors: np.ndarray) -> BlockScaledSource:
    save_file(tensors, folder / "model.safetensors")
    return BlockScaledSource(SafetensorsSource(folder / "model.safetensors"), BLOCK)


def test_values_are_products_and_scales_are_no_tensors(tmp_path, monkeypatch):
    """Also where neither the shape nor a chunk is a multiple of the block."""
    monkeypatch.setattr("jaxinfer.checkpoints.tensor_source.CHUNK_ELEMENTS", 100)
    monkeypatch.setattr("jaxinfer.checkpoints.safetensors_source.rows_per_chunk", lambda shape: 3)
    stored, scale, values = quantize(np.random.default_rng(0).normal(size=(29, 37)).astype(np.float32))
    plain = np.arange(6, dtype=np.float32)
    source = source_of(tmp_path, **{"a.weight": stored, "a.weight_scale_inv": scale, "b": plain})
    assert sorted(source.names()) == ["a.weight", "b"]
    assert [len(block) for block in source.chunks("a.weight")] == [3] * 9 + [2]
    np.testing.assert_array_equal(source.read("a.weight"), values)
    np.testing.assert_array_equal(source.read("b"), plain)
    info = source.info("a.weight")
    assert (info.shape, info.dtype, info.stored, info.quantized) == ((29, 37), np.float32, "F8_E4M3", True)
    assert resolve_dtype("auto", {}, source)[0] == jnp.bfloat16


def test_scales_of_another_shape_are_refused(tmp_path):
    stored, scale, _ = quantize(np.ones((16, 16), np.float32))
    with pytest.raises(
        CheckpointError, match=r"'a_scale_inv'.*\[2, 2\].*8 x 16 of a weight of shape \[16, 16\]"
    ):
        source_of(tmp_path, a=stored, a_scale_inv=np.repeat(scale, 2, axis=1))


def test_block_size_is_read_from_the_configuration():
    assert fp8_block_size({}) is None
    assert fp8_block_size({"quantization_config": {"quant_method": "gptq", "bits": 4}}) is None
    assert fp8_block_size({"quantization_config": SPEC}) == BLOCK
    with pytest.raises(CheckpointError, match=r"weight_block_size.*\[128\]"):
        fp8_block_size({"quantization_config": {**SPEC, "weight_block_size": [128]}})


@pytest.mark.feature("DeepseekV3")
def test_a_published_deepseek_v3_is_loaded(tmp_path):
    """Scaled float8 weights, and a layer for multi-token prediction that is left out."""
    save("deepseek_v3", tmp_path)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": SPEC, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    expected: dict[str, np.ndarray] = {}
    tensors: dict[str, np.ndarray] = {"model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32)}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if "_proj" in name and name.endswith("weight"):
            tensors[name], tensors[f"{name}_scale_inv"], expected[name] = quantize(weight)
        else:
            tensors[name] = expected[name] = weight
    save_file(tensors, tmp_path / "model.safetensors")

    files = open_model(tmp_path)
    model = parse_config(files.config)
    shapes = abstract_model(model, select_ops("reference", "cpu", strict=True), jnp.float32).shapes
    found = family(model.architecture)
    names = files.weight_map(found.weight_map(model))

    def load(unused: tuple[str, ...]) -> dict[str, jax.Array]:
        return load_params(shapes, names, files.source, lambda _, x: jnp.asarray(x), unused=unused)

    params = load(found.unused(model))
    rope_and_plain = expected["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 12 + 10, 24)
    np.testing.assert_array_equal(
        params["layers.1.attention.key_up.weight"], rope_and_plain[:, :12].reshape(-1, 24)
    )
    np.testing.assert_array_equal(
        params["layers.1.attention.value_up.weight"], rope_and_plain[:, 12:].reshape(-1, 24)
    )
    down = [expected[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
    np.testing.assert_array_equal(params["layers.1.mlp.experts.down"], np.stack(down))
    with pytest.raises(CheckpointError, match=r"'model.layers.2.eh_proj.weight'.*belongs to no parameter"):
        load(())
