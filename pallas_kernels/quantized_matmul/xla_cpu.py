"""Matrix product with a quantized weight in XLA, formulated for the CPU backend: dequantizes tile by tile.

A tile stays in the cache, while a dequantized weight goes through memory. A weight of 3072 x 1024 on two busy Zen 3
cores, this way, the whole weight at once (``xla``), and float32 weights: one row 0.9, 4.9 and 1.2 ms (int4: 1.1 and
4.2), 8 rows 2.3, 11.7 and 1.9 ms, 32 rows 5.6, 36.7 and 8.0 ms.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.linear.xla import add_bias
from pallas_kernels.quantized_matmul import activations
from pallas_kernels.quantized_matmul.reference import ordered
from pallas_kernels.quantized_matmul.tuning import Choice
from pallas_kernels.quantized_matmul.weights import INT4_MIDDLE, TILE, QuantizedWeight
from pallas_kernels.quantized_matmul.xla import supports

__all__ = ["quantized_matmul", "supports"]


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
    ok, why = supports(x_TI, w, bias_O)
    if not ok:
        raise ValueError(f"quantized_matmul: {why}")
    out_dtype = out_dtype or x_TI.dtype
    x_TI, scale_T = ordered(x_TI, w), None
    if w.activation is not None:
        x_TI, scale_T = activations.quantize(x_TI, w.activation, w.x_scale)
    y_TO = _product(x_TI.astype(jnp.float32), w)
    if scale_T is not None:
        y_TO = y_TO * scale_T[:, None]
    return add_bias(y_TO, bias_O, out_dtype)


def _product(x_TI: jax.Array, w: QuantizedWeight) -> jax.Array:
    """In float32, without the scales of the activations."""
    (T, I), (J, O, _) = x_TI.shape, w.values_JOP.shape
    x_JTi = jnp.pad(x_TI, ((0, 0), (0, J * TILE - I))).reshape(T, J, TILE).transpose(1, 0, 2)

    def add(sum_OT: jax.Array, tile: Any) -> tuple[jax.Array, None]:
        x_Ti, values_OP, scale_gO, zero_gO = tile
        zero_gO = w.zero_GO if w.group is None else zero_gO
        w_Oi = _tile(values_OP, scale_gO, zero_gO, w)
        contract_last = (((1,), (1,)), ((), ()))
        return sum_OT + jax.lax.dot_general(w_Oi, x_Ti, contract_last, precision="highest"), None

    by_tile = (
        None if x_GO is None or w.group is None else _by_tile(x_GO, w) for x_GO in (w.scale_GO, w.zero_GO)
    )
    tiles: tuple[jax.Array | None, ...] = (x_JTi, w.values_JOP, *by_tile)
    sum_OT, _ = jax.lax.scan(add, jnp.zeros((O, T), jnp.float32), tiles)
    return sum_OT.T if w.group is not None else sum_OT.T * w.scale_GO.astype(jnp.float32)


def _by_tile(x_GO: jax.Array, w: QuantizedWeight) -> jax.Array:
    """``[J, groups of a tile, O]``; a group of several tiles is in each of them."""
    J, O, _ = w.values_JOP.shape
    group = w.group or TILE
    return jnp.repeat(x_GO, max(1, group // TILE), axis=0)[: J * max(1, TILE // group)].reshape(J, -1, O)


def _tile(
    values_OP: Any, scale_gO: jax.Array | None, zero_gO: jax.Array | None, w: QuantizedWeight
) -> jax.Array:
    """The numbers of a tile, ``[O, 128]`` in float32; scaled only by groups."""
    if w.format == "int4":
        values_OP = jnp.concatenate([values_OP & 15, (values_OP >> 4) & 15], axis=1)
    w_Oi = values_OP.astype(jnp.float32)
    if zero_gO is not None:
        w_Oi = w_Oi - _spread(zero_gO)
    elif w.format == "int4":
        w_Oi = w_Oi - INT4_MIDDLE
    return w_Oi if scale_gO is None else w_Oi * _spread(scale_gO)


def _spread(x_gO: jax.Array) -> jax.Array:
    """``[O, 128]`` or ``[O, 1]``: a number per group of a tile for each of its inputs."""
    groups = x_gO.shape[0]
    return jnp.repeat(x_gO.T.astype(jnp.float32), 1 if groups == 1 else TILE // groups, axis=1)
