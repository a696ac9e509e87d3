"""Quantization of rows in Pallas-Triton: one launch that reads each value once.

XLA makes three kernels of it: the largest magnitudes, the scales, and the rounded rows (see ``docs/kernels.md``).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.quantize_rows.triton_row import STORED, check_row, lanes, store_quantized
from pallas_kernels.quantize_rows.tuning import Choice, choose
from pallas_kernels.quantized_matmul.weights import Activation
from pallas_kernels.triton_call import triton_call


def supports(x_TD: jax.Array, *, to: Activation, generation: Generation = "hopper") -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    return check_row(x_TD, x_TD.shape[1], to, generation)


def quantize_rows(
    x_TD: jax.Array,
    *,
    to: Activation,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.quantize_rows``."""
    T, D = x_TD.shape
    choice = choice or choose(generation, D, x_TD.dtype)
    return triton_call(
        partial(_kernel, to=to),
        grid=(T,),
        out_shape=(jax.ShapeDtypeStruct((T, D), STORED[to]), jax.ShapeDtypeStruct((T,), jnp.float32)),
        name="quantize_rows",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=interpret,
    )(x_TD)


def _kernel(x_ref: Any, q_ref: Any, scale_ref: Any, *, to: Activation) -> None:
    """One row."""
    D = x_ref.shape[1]
    row = pl.program_id(0)
    lane_d = jnp.arange(lanes(D))
    x_d = plgpu.load(x_ref.at[row, lane_d], mask=lane_d < D, other=0)
    store_quantized(x_d, q_ref, scale_ref, row, to)
