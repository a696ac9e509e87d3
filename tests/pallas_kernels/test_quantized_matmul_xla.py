"""Quantized matrix product in XLA: the contract."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import packing, reference, xla, xla_cpu
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.hlo_checks import compiled
from tests.pallas_kernels.quantized_matmul_cases import KINDS, QuantizedMatmulContract, draw


class TestXla(QuantizedMatmulContract):
    op = staticmethod(xla.quantized_matmul)
    # What it shares with the oracle is tested by the other backends.
    kinds = ("int8", "int4-g32-zero", "int4-ordered", "w8a8-fp8")
    alike = ()
    # Scales per group are rounded into weights of the dtype of x.
    tolerance = 4e-3


class TestXlaCpu(QuantizedMatmulContract):
    op = staticmethod(xla_cpu.quantized_matmul)

    def test_the_weight_is_not_converted_as_a_whole(self) -> None:
        x, w = jax.eval_shape(lambda: draw("int4-g64", 2, 997, 640, jnp.float32))
        text = compiled(jax.jit(xla_cpu.quantized_matmul).lower(x, w)).as_text()
        assert "f32[997,128]" in text
        assert "f32[997,640]" not in text
        assert "f32[5,997,128]" not in text


def test_the_oracle_dequantizes_as_the_formats_say() -> None:
    """``reference.dequantize`` in jnp against ``packing.dequantize`` in numpy."""
    dequantize = jitted(reference.dequantize)
    for kind in KINDS:
        _, w = draw(kind, 1, 48, 320, jnp.float32)
        np.testing.assert_array_equal(np.asarray(dequantize(w)), packing.dequantize(w))


def test_supports_only_reads_shapes() -> None:
    x_TI, w = jax.eval_shape(lambda: draw("int4-g128", 2, 48, 256, jnp.bfloat16))
    assert xla.supports(x_TI, w) == (True, "")
    ok, why = xla.supports(x_TI, w, jax.ShapeDtypeStruct((47,), jnp.float32))
    assert not ok
    assert "bias" in why
