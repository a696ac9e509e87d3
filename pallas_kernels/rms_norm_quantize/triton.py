"""Residual sum, norm and quantization of its rows in Pallas-Triton: one launch, every operand read once.

XLA makes three kernels of it (the sum; the scale of the normalised row; the norm again, quantized): see
``docs/kernels.md``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.quantize_rows.triton_row import STORED, check_row, lanes, store_quantized
from pallas_kernels.quantized_matmul.weights import Activation
from pallas_kernels.rms_norm_quantize.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call


def supports(
    x_TD: jax.Array,
    weight_D: jax.Array,
    residual_TD: jax.Array | None = None,
    *,
    eps: float,
    to: Activation,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if residual_TD is not None and (residual_TD.shape, residual_TD.dtype) != (x_TD.shape, x_TD.dtype):
        return (
            False,
            f"a residual of {residual_TD.dtype.name} {residual_TD.shape} for {x_TD.dtype.name} {x_TD.shape}",
        )
    return check_row(x_TD, x_TD.shape[1], to, generation)


def rms_norm_quantize(
    x_TD: jax.Array,
    weight_D: jax.Array,
    residual_TD: jax.Array | None = None,
    *,
    eps: float,
    to: Activation,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``reference.rms_norm_quantize``."""
    T, D = x_TD.shape
    choice = choice or choose(generation, D, x_TD.dtype)
    shapes = [jax.ShapeDtypeStruct((T, D), STORED[to]), jax.ShapeDtypeStruct((T,), jnp.float32)]
    inputs = [x_TD, weight_D]
    if residual_TD is not None:
        inputs.append(residual_TD)
        shapes.append(jax.ShapeDtypeStruct((T, D), x_TD.dtype))
    outputs = triton_call(
        partial(_kernel, eps=eps, to=to),
        grid=(T,),
        out_shape=shapes,
        name="rms_norm_quantize",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=interpret,
    )(*inputs)
    return outputs[0], outputs[1], x_TD if residual_TD is None else outputs[2]


def _kernel(x_ref: Any, weight_ref: Any, *refs: Any, eps: float, to: Activation) -> None:
    """One row. ``refs``: the residual if there is one, the quantized row, its scale, the sum if there is a residual."""
    D = x_ref.shape[1]
    row = pl.program_id(0)
    lane_d = jnp.arange(lanes(D))
    mask_d = lane_d < D
    q_ref, scale_ref = refs[-3:-1] if len(refs) == 4 else refs
    x_d = plgpu.load(x_ref.at[row, lane_d], mask=mask_d, other=0)
    if len(refs) == 4:
        x_d = x_d + plgpu.load(refs[0].at[row, lane_d], mask=mask_d, other=0)
        plgpu.store(refs[-1].at[row, lane_d], x_d, mask=mask_d)
    wide_d = x_d.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(wide_d * wide_d) / D + eps)
    weight_d = plgpu.load(weight_ref.at[lane_d], mask=mask_d, other=0)
    store_quantized((wide_d * inverse * weight_d).astype(x_ref.dtype), q_ref, scale_ref, row, to)
