"""The choice of backends."""

import logging

import pytest

from pallas_kernels.kv_write import reference, xla
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu
from pallas_kernels.select import select_ops


def test_cpu_gets_the_cpu_formulations(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ops = select_ops("auto", "cpu", strict=True)
    assert ops.linear is xla_cpu.linear
    assert ops.kv_write is xla.kv_write
    assert len(caplog.records) == 1
    assert "automatic choice" in caplog.text


def test_reference_only_when_asked() -> None:
    assert select_ops("reference", "cpu", strict=True).kv_write is reference.kv_write


def test_fallback_is_a_warning_and_under_strict_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_ops("auto", "gpu", strict=False).linear is linear_xla.linear
    assert "no kernel backend" in caplog.text
    with pytest.raises(RuntimeError, match="strict forbids"):
        select_ops("auto", "gpu", strict=True)
    assert select_ops("xla", "gpu", strict=True).linear is linear_xla.linear


def test_unknown_backend_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="auto, xla, reference"):
        select_ops("cuda", "gpu", strict=False)
