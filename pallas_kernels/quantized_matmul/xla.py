"""Matrix product with a quantized weight in XLA, for any platform: dequantizes the whole weight, then multiplies."""

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.linear.xla import add_bias, product
from pallas_kernels.quantized_matmul import activations
from pallas_kernels.quantized_matmul.reference import dequantize, differences, ordered
from pallas_kernels.quantized_matmul.tuning import Choice
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, problem


def supports(
    x_TI: jax.Array,
    w: QuantizedWeight,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    why = problem(x_TI, w, bias_O)
    return not why, why


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
    """See ``reference.quantized_matmul``. Scales per group are multiplied into weights of the dtype of x."""
    ok, why = supports(x_TI, w, bias_O)
    if not ok:
        raise ValueError(f"quantized_matmul: {why}")
    out_dtype = out_dtype or x_TI.dtype
    x_TI, scale_T = ordered(x_TI, w), None
    if w.activation is not None:
        x_TI, scale_T = activations.quantize(x_TI, w.activation, w.x_scale)
    y_TO = _product(x_TI, w)
    if scale_T is not None:
        y_TO = y_TO * scale_T[:, None]
    return add_bias(y_TO, bias_O, out_dtype)


def _product(x_TI: jax.Array, w: QuantizedWeight) -> jax.Array:
    """In float32, without the scales of the activations."""
    # Bytes are exact in bfloat16. Quantized activations are products of bytes; others keep their dtype.
    dtype = jnp.dtype(jnp.bfloat16) if x_TI.dtype.itemsize == 1 else x_TI.dtype
    if w.group is None:
        y_TO = product(x_TI.astype(dtype), _inputs(differences(w), x_TI).astype(dtype))
        return y_TO * w.scale_GO.astype(jnp.float32)
    return product(x_TI, _inputs(dequantize(w), x_TI).astype(dtype))


def _inputs(w_OI: jax.Array, x_TI: jax.Array) -> jax.Array:
    """Without padding."""
    return w_OI[:, : x_TI.shape[1]]
