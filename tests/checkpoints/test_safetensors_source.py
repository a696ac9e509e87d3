import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource, find_safetensors, normalize_name

A = np.arange(12, dtype=np.float32).reshape(3, 4)


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]], **moved: str) -> Path:
    """Writes shards and their index; ``moved`` overrides the shard the index names for a tensor."""
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors} | moved
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize(
    "dtype",
    [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.bool_],
)
def test_reads_every_dtype(tmp_path, dtype):
    array = A.astype(dtype)
    save_file(
        {"a": array, "empty": array[:0], "scalar": np.array(1.0, np.float32)}, tmp_path / "x.safetensors"
    )
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert set(source.names()) == {"a", "empty", "scalar"}
    assert (source.info("a").shape, source.info("a").dtype) == ((3, 4), array.dtype)
    np.testing.assert_array_equal(source.read("a"), array)
    np.testing.assert_array_equal(np.concatenate(list(source.chunks("a"))), array)
    assert source.read("empty").shape == (0, 4)
    assert list(source.chunks("empty")) == []
    assert source.read("scalar") == 1.0
    assert source.origin("a") == str(tmp_path / "x.safetensors")
    with pytest.raises(KeyError):
        source.info("b")


def test_reads_are_views_of_the_file(tmp_path):
    save_file({"a": A}, tmp_path / "x.safetensors")
    array = SafetensorsSource(tmp_path / "x.safetensors").read("a")
    assert isinstance(array, np.memmap)
    assert not array.flags.writeable


def test_shards(tmp_path):
    index = write_shards(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": -A}})
    source = SafetensorsSource(index)
    np.testing.assert_array_equal(source.read("b"), -A)
    assert source.origin("b").endswith("two.safetensors")


def test_index_decides_between_two_shards_with_the_same_tensor(tmp_path):
    shards = {"one.safetensors": {"a": A}, "two.safetensors": {"a": -A, "not_in_index": A}}
    index = write_shards(tmp_path, shards, a="one.safetensors", not_in_index="two.safetensors")
    source = SafetensorsSource(index)
    np.testing.assert_array_equal(source.read("a"), A)
    assert set(source.names()) == {"a", "not_in_index"}


def test_missing_shards_are_all_named(tmp_path):
    index = write_shards(tmp_path, {f"{i}.safetensors": {f"t{i}": A} for i in range(3)})
    (tmp_path / "0.safetensors").unlink()
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"2 of 3 shards are missing: \['0.safetensors', '2.safetensors'\]"
    ):
        SafetensorsSource(index)


def test_tensor_that_its_shard_lacks(tmp_path):
    index = write_shards(tmp_path, {"one.safetensors": {"a": A}}, ghost="one.safetensors")
    with pytest.raises(CheckpointError, match=r"one.safetensors: .*\['ghost'\]"):
        SafetensorsSource(index)


def test_shards_outside_the_directory_are_refused(tmp_path):
    index = write_shards(tmp_path, {"one.safetensors": {"a": A}}, b="../one.safetensors")
    with pytest.raises(CheckpointError, match="beside the index"):
        SafetensorsSource(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_malformed_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        SafetensorsSource(tmp_path / "model.safetensors.index.json")


def test_truncated_file_names_the_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": A, "b": A}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x.safetensors: truncated: tensor 'b' ends at byte"):
        SafetensorsSource(path)


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_truncated_header(tmp_path, size):
    path = tmp_path / "x.safetensors"
    save_file({"a": A}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"x.safetensors: truncated or not a safetensors file"):
        SafetensorsSource(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"\[3\] is 12 bytes, not \[0, 8\)"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "dtype 'F4'"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "tensor 't'"),
        ({"dtype": "F32", "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "malformed"),
        (7, "malformed"),
    ],
)
def test_corrupt_header_entries(tmp_path, entry, message):
    header = json.dumps({"t": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsSource(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(error.value)


def test_file_that_is_something_else(tmp_path):
    (tmp_path / "x.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff\x00{}" + bytes(8))
    with pytest.raises(CheckpointError, match="not valid JSON"):
        SafetensorsSource(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"no.safetensors: No such file"):
        SafetensorsSource(tmp_path / "no.safetensors")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.layers.0.weight", "vision_tower.layers.0.weight"),
    ],
)
def test_names(stored, expected):
    assert normalize_name(stored) == expected


def test_two_tensors_for_one_name(tmp_path):
    save_file({"norm.weight": A, "model.norm.weight": A}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"both stand for 'model.norm.weight'"):
        SafetensorsSource(tmp_path / "x.safetensors")


def test_origin_shows_the_name_in_the_file(tmp_path):
    save_file({"norm.weight": A}, tmp_path / "x.safetensors")
    assert (
        SafetensorsSource(tmp_path / "x.safetensors")
        .origin("model.norm.weight")
        .endswith("(as 'norm.weight')")
    )


def test_finding_the_file(tmp_path):
    assert find_safetensors(tmp_path) is None
    save_file({"a": A}, tmp_path / "other.safetensors")
    assert find_safetensors(tmp_path) == tmp_path / "other.safetensors"
    save_file({"a": A}, tmp_path / "second.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        find_safetensors(tmp_path)
    save_file({"a": A}, tmp_path / "model.safetensors")
    assert find_safetensors(tmp_path) == tmp_path / "model.safetensors"
