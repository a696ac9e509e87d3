"""LOD-08: which dtype the weights get, and casts that lose values."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoints.dtypes import resolve_dtype
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.tensor_source import TensorInfo

BF16 = np.dtype(ml_dtypes.bfloat16)


class HeaderSource:
    """A source of headers only."""

    def __init__(self, **infos: TensorInfo) -> None:
        self._infos = infos

    def names(self) -> tuple[str, ...]:
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        raise AssertionError("a dtype is resolved from headers")

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        raise AssertionError("a dtype is resolved from headers")

    def origin(self, name: str) -> str:
        return "file"


STORED_BF16 = HeaderSource(
    w=TensorInfo((64, 64), BF16, "BF16"), norm=TensorInfo((64,), np.dtype("f4"), "F32")
)
QUANTIZED = HeaderSource(
    w=TensorInfo((64, 64), np.dtype("f4"), "Q4_1", quantized=True),
    norm=TensorInfo((64,), np.dtype("f4"), "F32"),
)


@pytest.mark.parametrize(
    ("requested", "config", "expected", "where"),
    [
        ("float32", {"dtype": "bfloat16"}, "float32", "requested"),
        ("auto", {"dtype": "float16", "torch_dtype": "bfloat16"}, "float16", "dtype of"),
        (None, {"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16", "dtype of"),
        (None, {"torch_dtype": "bfloat16"}, "bfloat16", "torch_dtype of"),
        (None, {"torch_dtype": "torch.float32"}, "float32", "torch_dtype of"),
        (None, {}, "bfloat16", "stored"),
        (None, {"dtype": None, "torch_dtype": None, "text_config": None}, "bfloat16", "stored"),
        (None, {"text_config": {"torch_dtype": "float16"}}, "float16", "text_config.torch_dtype"),
        (None, {"torch_dtype": "float32", "text_config": {"dtype": "float16"}}, "float32", "torch_dtype of"),
        (None, {"torch_dtype": "float16"}, "float16", "torch_dtype of"),
    ],
)
def test_lod_08_order(requested, config, expected, where):
    """Pinned: command line, dtype, torch_dtype, the same in text_config, what most elements are stored in."""
    dtype, reason = resolve_dtype(requested, config, STORED_BF16)
    assert dtype.name == expected
    assert where in reason


def test_lod_08_contradiction_is_loud(caplog):
    """Declared float16, stored bfloat16: the declaration wins, and a warning names both."""
    _, reason = resolve_dtype(None, {"torch_dtype": "float16"}, STORED_BF16)
    assert "stored as bfloat16, float32 are cast" in reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_lod_08_norms_in_float32_are_no_contradiction(caplog):
    """Pinned: most elements decide; what else is stored is named in the reason, without a warning."""
    caplog.set_level("INFO")
    dtype, reason = resolve_dtype(None, {}, STORED_BF16)
    assert dtype.name == "bfloat16"
    assert "stored as float32 are cast" in reason
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_lod_08_quantized_weights_default_to_bfloat16():
    """Pinned: weights stored in blocks with scales are computed in bfloat16 unless something is requested."""
    assert resolve_dtype(None, {"torch_dtype": None}, QUANTIZED)[0].name == "bfloat16"
    assert resolve_dtype("float32", {"torch_dtype": None}, QUANTIZED)[0].name == "float32"


@pytest.mark.parametrize(
    ("requested", "config", "where"),
    [
        ("foo", {}, "the requested dtype is 'foo'"),
        ("fp16", {}, "the requested dtype is 'fp16'"),
        (None, {"dtype": "foo"}, "dtype of the model's configuration is 'foo'"),
        (None, {"torch_dtype": "int8"}, "torch_dtype of the model's configuration is 'int8'"),
        (
            None,
            {"text_config": {"dtype": "float64"}},
            r"text_config.dtype of .* is 'float64'",
        ),
    ],
)
def test_lod_08_unknown_dtype(requested, config, where):
    with pytest.raises(CheckpointError, match=f"{where}; allowed are float32, float16, bfloat16"):
        resolve_dtype(requested, config, STORED_BF16)


def test_lod_08_unknown_stored_dtype():
    source = HeaderSource(w=TensorInfo((64, 64), np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3"))
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        resolve_dtype(None, {}, source)
