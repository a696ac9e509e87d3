"""What kernels that end in a quantized row share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_write.triton_convert import check_values, convert
from pallas_kernels.quantized_matmul.activations import LIMITS
from pallas_kernels.quantized_matmul.weights import Activation

STORED = {"fp8": jnp.dtype(jnp.float8_e4m3fn), "int8": jnp.dtype(jnp.int8)}
LARGEST_ROW = 32768
_LEAST_SCALE = 1e-12


def check_row(x: jax.Array, width: int, to: Activation, generation: Generation) -> tuple[bool, str]:
    """Whether rows of ``width`` values like those of ``x`` can be quantized, and why not."""
    if to == "fp8" and generation == "ampere":
        return False, "this GPU generation cannot convert to float8_e4m3fn"
    if width > LARGEST_ROW:
        return False, f"rows of {width} values do not fit into registers; allowed: at most {LARGEST_ROW}"
    return check_values(x)


def store_quantized(value_d: jax.Array, q_ref: Any, scale_ref: Any, row: jax.Array, to: Activation) -> None:
    """Quantizes one row by its largest magnitude.

    Args:
        value_d: a power of two of values; 0 behind those of the row.
        q_ref, scale_ref: ``[T, D]`` and ``[T]``.
    """
    wide_d = value_d.astype(jnp.float32)
    # Triton's maximum drops NaN, and an integer cannot hold it: the scale has to carry it on.
    poison = jnp.sum(wide_d * 0.0)
    scale = jnp.maximum(jnp.max(jnp.abs(wide_d)) / LIMITS[to], _LEAST_SCALE) + poison
    lane_d = jnp.arange(value_d.shape[0])
    plgpu.store(q_ref.at[row, lane_d], convert(wide_d, scale, STORED[to]), mask=lane_d < q_ref.shape[1])
    scale_ref[row] = scale


def lanes(width: int) -> int:
    """Values that a program holds for a row."""
    return pl.next_power_of_2(width)
