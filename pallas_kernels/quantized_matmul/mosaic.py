"""Matrix product of quantized activations and weights in Pallas Mosaic GPU, for Hopper: many rows of W8A8.

Pallas-Triton multiplies float8 numbers as float16, at half the rate.
"""

import re

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.quantized_matmul import activations, tuning
from pallas_kernels.quantized_matmul.tuning import Choice
from pallas_kernels.quantized_matmul.weights import TILE, QuantizedWeight, problem

LEAST_TOKENS = 65
_LEAST_JAX = (0, 11)
_BLOCK_M = 128
_OUT_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))


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
    if not has_mosaic():
        return False, f"jax {jax.__version__} is older than 0.11, whose Mosaic GPU this needs"
    if generation != "hopper":
        return False, f"wgmma is of Hopper, not of {generation}"
    if w.activation is None:
        return False, "activations are not quantized"
    if w.order_I is not None:
        return False, "the inputs of the weight are reordered"
    if x_TI.shape[0] < LEAST_TOKENS:
        return (
            False,
            f"{x_TI.shape[0]} rows; allowed: {LEAST_TOKENS} and more, since {_BLOCK_M} are computed at a time",
        )
    if w.values_JOP.shape[1] % 128:
        return False, f"{w.values_JOP.shape[1]} outputs; allowed: multiples of 128"
    if jnp.dtype(out_dtype or x_TI.dtype) not in _OUT_DTYPES:
        return False, f"a result of {out_dtype}; allowed: bfloat16, float16 and float32"
    return True, ""


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
    """See ``reference.quantized_matmul``. ``interpret`` looks for races."""
    ok, why = supports(x_TI, w, bias_O, out_dtype=out_dtype, generation=generation)
    if not ok:
        raise ValueError(f"quantized_matmul: {why}")
    # Not at the top: older versions of JAX have no such module, and the XLA path must be importable there.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.quantized_matmul.mosaic_kernel import Plan, multiply

    choice = choice or tuning.choose_mosaic(tuning.facts(x_TI, w))
    out_dtype = jnp.dtype(out_dtype or x_TI.dtype)
    T, (J, O, _) = x_TI.shape[0], w.values_JOP.shape
    x_TI, scale_T = activations.quantize(x_TI, w.activation, w.x_scale)  # type: ignore[arg-type]
    rows = -T % _BLOCK_M
    x_TI = jnp.pad(x_TI, ((0, rows), (0, J * TILE - x_TI.shape[1])))
    plan = Plan(
        T=T + rows,
        O=O,
        J=J,
        dtype=x_TI.dtype,
        out_dtype=out_dtype,
        has_bias=bias_O is not None,
        block_o=choice.block_o,
        stages=min(choice.num_stages, J),
    )
    bias = () if bias_O is None else (bias_O.astype(jnp.float32),)
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None  # type: ignore[attr-defined]
    run = multiply(plan, params)
    y_TO = run(x_TI, w.values_JOP, w.scale_GO[0].astype(jnp.float32), jnp.pad(scale_T, (0, rows)), *bias)
    return y_TO[:T]


def has_mosaic() -> bool:
    """Whether this JAX has the Mosaic GPU that the kernel is written for."""
    return tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:2]) >= _LEAST_JAX
