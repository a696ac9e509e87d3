"""Quantization of rows, of norms and of gates in Pallas-Triton: contracts in interpret mode, and what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gate_quantize import cases as gate_cases
from pallas_kernels.gate_quantize import triton as gate
from pallas_kernels.kernel_case import KernelCase
from pallas_kernels.quantize_rows import cases as rows_cases
from pallas_kernels.quantize_rows import triton as rows
from pallas_kernels.quantize_rows.tuning import warps_for
from pallas_kernels.rms_norm_quantize import cases as norm_cases
from pallas_kernels.rms_norm_quantize import triton as norm
from tests.pallas_kernels.row_quantize_cases import (
    GateQuantizeContract,
    QuantizeRowsContract,
    RmsNormQuantizeContract,
)


class TestQuantizeRowsTriton(QuantizeRowsContract):
    op = staticmethod(partial(rows.quantize_rows, interpret=True))


class TestRmsNormQuantizeTriton(RmsNormQuantizeContract):
    op = staticmethod(partial(norm.rms_norm_quantize, interpret=True))


class TestGateQuantizeTriton(GateQuantizeContract):
    op = staticmethod(partial(gate.gate_quantize, interpret=True))


@pytest.mark.parametrize(
    "case",
    rows_cases.kernel_cases() + norm_cases.kernel_cases() + gate_cases.kernel_cases(),
    ids=lambda case: f"{case.op}-{case.name}",
)
def test_cases_trace(case: KernelCase) -> None:
    inputs = jax.eval_shape(case.inputs, jax.random.key(0))
    want = jax.eval_shape(case.oracle, *inputs)
    for op in (case.baseline, *(case.build("hopper", choice) for choice in case.candidates)):
        assert op is not None
        assert jax.tree.leaves(jax.eval_shape(op, *inputs)) == jax.tree.leaves(want)


@pytest.mark.parametrize(("values", "want"), [(40, 1), (512, 1), (513, 2), (4096, 8), (100_000, 16)])
def test_warps(values: int, want: int) -> None:
    assert warps_for(values, 16) == want


def test_what_is_refused() -> None:
    x_TD: Any = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    weight_D: Any = jax.ShapeDtypeStruct((64,), jnp.float32)
    other_TD: Any = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    wide_TD: Any = jax.ShapeDtypeStruct((4, 1 << 17), jnp.bfloat16)
    supports = partial(norm.supports, eps=1e-5)
    assert supports(x_TD, weight_D, to="fp8") == (True, "")
    assert "residual of float32" in supports(x_TD, weight_D, other_TD, to="fp8")[1]
    assert "float8_e4m3fn" in supports(x_TD, weight_D, to="fp8", generation="ampere")[1]
    assert supports(x_TD, weight_D, to="int8", generation="ampere") == (True, "")
    assert "registers" in supports(wide_TD, weight_D, to="int8")[1]
    assert gate.supports(x_TD, activation="silu", to="fp8") == (True, "")
    assert "error function" in gate.supports(x_TD, activation="gelu", to="fp8")[1]
