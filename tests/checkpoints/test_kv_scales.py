"""Scales of a quantized KV cache in a checkpoint (case LOD-07)."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.kv_scales import is_kv_scale, read_kv_scales
from jaxinfer.checkpoints.tensor_source import TensorInfo


class _Source:
    def __init__(self, tensors: dict[str, object]) -> None:
        self._tensors = {name: np.asarray(value, np.float32) for name, value in tensors.items()}

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._tensors[name].shape, self._tensors[name].dtype, "F32")

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        yield self._tensors[name]

    def origin(self, name: str) -> str:
        return "test.safetensors"


def _names(spelling: str, layer: int) -> tuple[str, str]:
    prefix = f"model.layers.{layer}.self_attn."
    return prefix + spelling.format("k"), prefix + spelling.format("v")


@pytest.mark.parametrize("spelling", ["{0}_scale", "{0}_proj.{0}_scale", "attn.{0}_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lod_07_all_spellings_give_the_same_arrays(spelling, shape):
    tensors = {}
    for layer in range(2):
        k, v = _names(spelling, layer)
        tensors |= {k: np.full(shape, 2.5), v: np.full(shape, 0.0001)}
    assert all(is_kv_scale(name) for name in tensors)
    scales = read_kv_scales(_Source(tensors), 2, 4)
    for layer in range(2):
        np.testing.assert_array_equal(scales[layer][0], np.float32([2.5]))
        np.testing.assert_array_equal(scales[layer][1], np.float32([0.0001]))


def test_lod_07_one_scale_for_both_and_one_per_head():
    scales = read_kv_scales(_Source({"model.layers.0.self_attn.kv_scale": 0.5}), 1, 2)
    assert scales[0][0] == scales[0][1] == np.float32(0.5)
    per_head = {"model.layers.0.self_attn.k_scale": [1, 2], "model.layers.0.self_attn.v_scale": [3, 4]}
    np.testing.assert_array_equal(read_kv_scales(_Source(per_head), 1, 2)[0][1], [3, 4])


def test_lod_07_absent_scales_are_one_with_a_warning(caplog):
    assert read_kv_scales(_Source({"model.norm.weight": [1.0]}), 2, 4) == {}
    assert "1.0 is used" in caplog.text


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0, [1.0, 2.0, 3.0]])
def test_lod_07_bad_scales_are_an_error_at_start(bad):
    tensors = {"model.layers.0.self_attn.k_scale": bad, "model.layers.0.self_attn.v_scale": 1.0}
    with pytest.raises(CheckpointError, match=r"k_scale.*test\.safetensors"):
        read_kv_scales(_Source(tensors), 1, 2)


def test_lod_07_a_missing_layer_or_half_is_an_error_at_start():
    with pytest.raises(CheckpointError, match="layer 1 has no k_scale"):
        read_kv_scales(_Source({"model.layers.0.self_attn.kv_scale": 1.0}), 2, 2)
    with pytest.raises(CheckpointError, match="layer 0 has no v_scale"):
        read_kv_scales(_Source({"model.layers.0.self_attn.k_scale": 1.0}), 1, 2)
