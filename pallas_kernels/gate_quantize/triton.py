"""Gate and quantization of its rows in Pallas-Triton: one launch, every operand read once.

XLA makes three or four kernels of it, with the gate in float32 in memory between them: see ``docs/kernels.md``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gate.reference import GateActivation, activate
from pallas_kernels.gate_quantize.tuning import Choice, choose
from pallas_kernels.gpus import Generation
from pallas_kernels.quantize_rows.triton_row import STORED, check_row, lanes, store_quantized
from pallas_kernels.quantized_matmul.weights import Activation
from pallas_kernels.triton_call import triton_call


def supports(
    gate_up_T2F: jax.Array, *, activation: GateActivation, to: Activation, generation: Generation = "hopper"
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if activation == "gelu":
        return False, "activation gelu, because Pallas-Triton has no error function; allowed: silu, gelu_tanh"
    return check_row(gate_up_T2F, gate_up_T2F.shape[1] // 2, to, generation)


def gate_quantize(
    gate_up_T2F: jax.Array,
    *,
    activation: GateActivation,
    to: Activation,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.gate_quantize``."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    choice = choice or choose(generation, F, gate_up_T2F.dtype)
    return triton_call(
        partial(_kernel, activation=activation, to=to),
        grid=(T,),
        out_shape=(jax.ShapeDtypeStruct((T, F), STORED[to]), jax.ShapeDtypeStruct((T,), jnp.float32)),
        name="gate_quantize",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=interpret,
    )(gate_up_T2F)


def _kernel(
    gate_up_ref: Any, q_ref: Any, scale_ref: Any, *, activation: GateActivation, to: Activation
) -> None:
    """One row."""
    F = q_ref.shape[1]
    row = pl.program_id(0)
    lane_f = jnp.arange(lanes(F))
    gate_f, up_f = (
        plgpu.load(gate_up_ref.at[row, start + lane_f], mask=lane_f < F, other=0).astype(jnp.float32)
        for start in (0, F)
    )
    value_f = activate(gate_f, activation) * up_f
    store_quantized(value_f.astype(gate_up_ref.dtype), q_ref, scale_ref, row, to)
