"""Matrix product with a quantized weight: the semantics."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import activations
from pallas_kernels.quantized_matmul.weights import INT4_MIDDLE, TILE, QuantizedWeight, problem


def quantized_matmul(
    x_TI: jax.Array,
    w: QuantizedWeight,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """``x @ dequantized(w).T + bias`` accumulated in float32, returned in ``out_dtype`` (default: the dtype of x).

    With ``w.activation`` the product is of quantized rows.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if why := problem(x_TI, w, bias_O):
        raise ValueError(f"quantized_matmul: {why}")
    out_dtype = out_dtype or x_TI.dtype
    x_TI, scale_T = ordered(x_TI, w).astype(jnp.float32), None
    if w.activation is not None:
        x_TI, scale_T = activations.quantize(x_TI, w.activation, w.x_scale)
    w_OI = dequantize(w)[:, : x_TI.shape[1]]
    y_TO = jnp.einsum("ti,oi->to", x_TI.astype(jnp.float32), w_OI, precision="highest")
    if scale_T is not None:
        y_TO = y_TO * scale_T[:, None]
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)
    return y_TO.astype(out_dtype)


def ordered(x_TI: jax.Array, w: QuantizedWeight) -> jax.Array:
    """The activations in the order of the stored inputs."""
    if w.order_I is None:
        return x_TI
    # XLA's CPU compiler takes a bfloat16 product of a gather for one that it has, and then has not.
    return jax.lax.optimization_barrier(x_TI[:, w.order_I])


def dequantize(w: QuantizedWeight) -> jax.Array:
    """``[O, J * 128]`` in float32, as ``packing.dequantize`` does it in numpy."""
    return _spread(w.scale_GO.astype(jnp.float32), w) * differences(w)


def differences(w: QuantizedWeight) -> jax.Array:
    """Stored numbers less their zero points, ``[O, J * 128]`` in float32: small integers, or float8 numbers."""
    values_JOP = w.values_JOP
    if w.format == "int4":
        values_JOP = jnp.concatenate([values_JOP & 15, (values_JOP >> 4) & 15], axis=2)
    J, O, _ = values_JOP.shape
    stored_OI = values_JOP.astype(jnp.float32).transpose(1, 0, 2).reshape(O, J * TILE)
    if w.zero_GO is not None:
        return stored_OI - _spread(w.zero_GO.astype(jnp.float32), w)
    return stored_OI - INT4_MIDDLE if w.format == "int4" else stored_OI


def _spread(x_GO: jax.Array, w: QuantizedWeight) -> jax.Array:
    """``[O, J * 128]``: a number per group for each of its inputs."""
    J = w.values_JOP.shape[0]
    return jnp.repeat(x_GO.T, w.group or J * TILE, axis=1)[:, : J * TILE]
