"""Matrix product with a quantized weight in Pallas-Triton, for Ampere and newer."""

from functools import reduce

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.linear.xla import add_bias
from pallas_kernels.pool_limits import offsets_fit
from pallas_kernels.quantized_matmul import activations, tuning
from pallas_kernels.quantized_matmul.reference import ordered
from pallas_kernels.quantized_matmul.triton_kernel import Plan, make
from pallas_kernels.quantized_matmul.tuning import Choice
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, problem
from pallas_kernels.triton_call import triton_call

_FLOATS = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))


def supports(
    x_TI: jax.Array,
    w: QuantizedWeight,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if why := problem(x_TI, w, bias_O):
        return False, why
    if x_TI.dtype not in _FLOATS:
        return False, f"activations of {x_TI.dtype.name}; allowed: bfloat16, float16 and float32"
    if w.format == "fp8" and generation == "ampere":
        return False, "this GPU generation cannot convert float8_e4m3fn"
    return offsets_fit(w.values_JOP.shape, w.values_JOP.dtype)


def quantized_matmul(
    x_TI: jax.Array,
    w: QuantizedWeight,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.quantized_matmul``."""
    ok, why = supports(x_TI, w, bias_O, generation=generation)
    if not ok:
        raise ValueError(f"quantized_matmul: {why}")
    choice = choice or tuning.choose(generation, tuning.facts(x_TI, w))
    if why := tuning.problem(choice, w):
        raise ValueError(f"quantized_matmul: {why}")
    out_dtype, dtype = out_dtype or x_TI.dtype, x_TI.dtype
    x_TI, scale_T = ordered(x_TI, w), None
    if w.activation is not None:
        x_TI, scale_T = activations.quantize(x_TI, w.activation, w.x_scale)
        # Products of float8 numbers: exact in float16, which their conversion instruction yields.
        dtype = jnp.dtype(jnp.float16 if w.activation == "fp8" else jnp.int8)
    in_kernel = bias_O if choice.splits == 1 else None
    plan = _plan(x_TI, w, dtype, scale_T is not None, in_kernel is not None, choice, interpret)
    y_STO = triton_call(
        make(plan),
        grid=plan.grid,
        out_shape=jax.ShapeDtypeStruct(
            (choice.splits, plan.T, plan.O), out_dtype if choice.splits == 1 else jnp.float32
        ),
        name=f"quantized_matmul_{w.format}",
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        interpret=interpret,
    )(*(a for a in (x_TI, w.values_JOP, w.scale_GO, w.zero_GO, scale_T, in_kernel) if a is not None))
    if choice.splits == 1:
        return y_STO[0]
    # Added one by one: a reduction would leave the order to the compiler.
    return add_bias(reduce(jnp.add, [y_STO[i] for i in range(choice.splits)]), bias_O, out_dtype)


def _plan(
    x_TI: jax.Array,
    w: QuantizedWeight,
    dtype: jnp.dtype,
    has_x_scale: bool,
    has_bias: bool,
    choice: Choice,
    interpret: bool,
) -> Plan:
    (T, I), (J, O, P) = x_TI.shape, w.values_JOP.shape
    return Plan(
        T=T,
        O=O,
        I=I,
        J=J,
        P=P,
        format=w.format,
        group=w.group,
        dtype=dtype,
        has_zero=w.zero_GO is not None,
        has_x_scale=has_x_scale,
        has_bias=has_bias,
        assembly=w.format == "int4" and not interpret and dtype != jnp.float32,
        choice=choice,
    )
