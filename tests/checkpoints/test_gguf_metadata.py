import contextlib
import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from tiny_gguf_files import write_gguf

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_metadata import read_gguf_header, read_gguf_metadata


@pytest.fixture
def file(tmp_path):
    metadata = {
        "tokenizer.ggml.tokens": ["a", "", "Ġé", "<|im_end|>", "日本"],
        "tokenizer.ggml.scores": [0.5, -1.0, 0.0, 1e-3, 2.0],
        "tokenizer.ggml.token_type": [1, 2, 3, 1, 6],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ x }}\n",
        "count": 7,
        "ratio": 0.25,
    }
    tensors = {
        "w": (np.ones((3, 64), np.float32), Type.Q4_0),
        "norm": (np.ones(5, np.float32), Type.F32),
        "stack": (np.ones((2, 3, 32), np.float32), Type.Q8_0),
    }
    return write_gguf(tmp_path / "x.gguf", "llama", metadata, tensors)


def test_same_as_the_gguf_package(file):
    header, reference = read_gguf_header(file), gguf.GGUFReader(file)
    assert header.metadata == {
        key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")
    }
    assert [(t.name, t.type, header.data_start + t.offset, t.shape) for t in header.tensors] == [
        (t.name, t.tensor_type, t.data_offset, tuple(reversed(t.shape.tolist()))) for t in reference.tensors
    ]
    assert header.file_size == file.stat().st_size


def test_arrays_are_plain_lists(file):
    metadata = read_gguf_metadata(file)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "", "Ġé", "<|im_end|>", "日本"]
    assert {type(score) for score in metadata["tokenizer.ggml.scores"]} == {float}
    assert {type(kind) for kind in metadata["tokenizer.ggml.token_type"]} == {int}
    assert metadata["tokenizer.ggml.add_bos_token"] is True


def test_every_scalar_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values = {
        "uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 4_000_000_000, "int32": -7,
        "uint64": 2**63, "int64": -(2**62), "float32": 0.5, "float64": 1e300, "bool": False,
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(tmp_path / "x.gguf")
    assert {kind: metadata[f"k.{kind}"] for kind in values} == values


def test_alignment_moves_the_data(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("w", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_header(tmp_path / "x.gguf").data_start == 256


def test_every_truncation_of_the_header_is_an_error(file):
    data = file.read_bytes()
    for size in range(read_gguf_header(file).data_start - 32):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"x.gguf"):
            read_gguf_header(file)


def test_every_corrupt_byte_is_an_error_or_harmless(file):
    """No flipped byte of the header may hang, exhaust memory, or raise anything but CheckpointError."""
    data = file.read_bytes()
    for position in range(0, read_gguf_header(file).data_start, 3):
        for value in (0, 0xFF):
            file.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
            with contextlib.suppress(CheckpointError):
                read_gguf_header(file)


def _file(path, body: bytes, keys: int = 1) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, keys) + body)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(30), "not a GGUF file: it starts with b'GGML'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(30), "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(30), "big-endian"),
    ],
)
def test_other_files(tmp_path, data, message):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(tmp_path / "x.gguf")


def test_bad_values(tmp_path):
    path = tmp_path / "x.gguf"
    _file(path, _string(b"key") + struct.pack("<I", 13) + bytes(8))
    with pytest.raises(CheckpointError, match=r"x.gguf: metadata key 'key': metadata type 13"):
        read_gguf_header(path)
    _file(path, _string(b"key") + struct.pack("<I", 8) + _string(b"\xff\xfe"))
    with pytest.raises(CheckpointError, match=r"metadata key 'key'.*utf-8"):
        read_gguf_header(path)
    entry = _string(b"key") + struct.pack("<IB", 0, 1)
    _file(path, entry + entry, keys=2)
    with pytest.raises(CheckpointError, match="'key' appears twice"):
        read_gguf_header(path)
    _file(path, _string(b"key") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(64))
    with pytest.raises(CheckpointError, match="truncated"):
        read_gguf_header(path)


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none.gguf: No such file"):
        read_gguf_header(tmp_path / "none.gguf")
