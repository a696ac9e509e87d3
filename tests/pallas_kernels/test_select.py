"""The choice of backends."""

import logging

import pytest

from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu
from pallas_kernels.preferred import Preferred
from pallas_kernels.rope_kv_write import reference, triton, xla
from pallas_kernels.select import select_ops


def test_cpu_gets_the_cpu_formulations(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ops = select_ops("auto", "cpu", strict=True)
    assert ops.linear is xla_cpu.linear
    assert ops.rope_kv_write is xla.rope_kv_write
    assert ops.platform == "cpu"
    assert len(caplog.records) == 1
    assert "automatic choice" in caplog.text


def test_reference_only_when_asked() -> None:
    assert select_ops("reference", "cpu", strict=True).rope_kv_write is reference.rope_kv_write


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_gets_triton_kernels_and_the_choice_is_told_once(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ops = select_ops(backend, "gpu", strict=True, generation="ampere")
    for op in (ops.attention, ops.rope_kv_write, ops.grouped_matmul):
        assert isinstance(op, Preferred)
        assert (op.backend, op.generation, op.strict, op.interpret) == ("triton", "ampere", True, False)
    assert ops.rope_kv_write.kernel is triton.rope_kv_write
    assert ops.platform == "gpu"
    assert len(caplog.records) == 1
    assert "triton" in caplog.text
    assert "ampere" in caplog.text


def test_equal_choices_are_equal_so_that_engines_share_compiled_programs() -> None:
    assert select_ops("auto", "gpu", True, "hopper") == select_ops("triton", "gpu", True, "hopper")
    assert hash(select_ops("auto", "gpu", True, "hopper")) == hash(select_ops("auto", "gpu", True, "hopper"))


def test_triton_on_a_cpu_is_interpreted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ops = select_ops("triton", "cpu", strict=True)
    assert isinstance(ops.attention, Preferred)
    assert ops.attention.interpret
    assert ops.platform == "gpu", "kernels take pools as a GPU holds them"
    assert "slow" in caplog.text


def test_mosaic_is_triton_with_its_own_attention() -> None:
    ops, plain = (
        select_ops(backend, "gpu", strict=True, generation="hopper") for backend in ("mosaic", "triton")
    )
    assert isinstance(ops.attention, Preferred)
    assert (ops.attention.backend, ops.attention.fallback) == ("mosaic", plain.attention)
    assert ops.rope_kv_write == plain.rope_kv_write
    with pytest.raises(RuntimeError, match="mosaic needs a GPU"):
        select_ops("mosaic", "cpu", strict=False)


@pytest.mark.parametrize("backend", ["auto", "triton", "mosaic"])
def test_fallback_is_a_warning_and_under_strict_an_error(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_ops(backend, "gpu", strict=False).linear is linear_xla.linear
    assert "no kernels for this device" in caplog.text
    with pytest.raises(RuntimeError, match="strict forbids"):
        select_ops(backend, "gpu", strict=True)
    assert select_ops("xla", "gpu", strict=True).linear is linear_xla.linear


def test_unknown_backend_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="auto, xla, triton, mosaic, reference"):
        select_ops("cuda", "gpu", strict=False)
