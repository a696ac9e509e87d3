"""Matrix products with packed weights on CPUs, by the native library; plain arrays go to XLA.

Where the library is absent, packed weights are unpacked inside the program: right, but slow.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.linear import int8, xla_cpu
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, unpack
from pallas_kernels.native.library import available, cpu_level

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
Activations = Literal["float", "int8", "bfloat16"]
CODES: dict[Activations, int] = {"float": 0, "int8": 1, "bfloat16": 2}
"""Of the library."""


def products_of_bfloat16() -> bool:
    """Whether the library has instructions for products of bfloat16; else ``linear_bf16`` is slower than ``linear``."""
    return available()[0] and cpu_level() >= 4


def supports(
    x_TI: jax.Array,
    w_OI: PackedWeight | jax.Array,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if not isinstance(w_OI, PackedWeight):
        return xla_cpu.supports(x_TI, w_OI, bias_O, out_dtype=out_dtype)
    if x_TI.ndim != 2 or x_TI.shape[1] != w_OI.inputs:
        return False, f"x is {x_TI.shape}, the weight {w_OI.shape}"
    for dtype in (x_TI.dtype, out_dtype or x_TI.dtype):
        if dtype not in FLOATS:
            return False, f"{jnp.dtype(dtype).name} is not float32, bfloat16 or float16"
    return True, ""


def linear(
    x_TI: jax.Array,
    w_OI: PackedWeight | jax.Array,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """See ``reference.linear``; w may be packed.

    Raises:
        ValueError: a packed weight that does not fit x, or a dtype that is not served.
    """
    return _linear(x_TI, w_OI, bias_O, out_dtype, "float")


def linear_int8(
    x_TI: jax.Array,
    w_OI: PackedWeight | jax.Array,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """See ``int8.linear``; the sum of a block is exact. Plain arrays are multiplied with x as it is.

    Raises:
        ValueError: as ``linear``.
    """
    return _linear(x_TI, w_OI, bias_O, out_dtype, "int8")


def linear_bf16(
    x_TI: jax.Array,
    w_OI: PackedWeight | jax.Array,
    bias_O: jax.Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """``linear`` with x rounded to bfloat16 where all of w is packed bfloat16, sums in float32.

    Raises:
        ValueError: as ``linear``.
    """
    return _linear(x_TI, w_OI, bias_O, out_dtype, "bfloat16")


def _linear(
    x_TI: jax.Array,
    w_OI: PackedWeight | jax.Array,
    bias_O: jax.Array | None,
    out_dtype: jnp.dtype | None,
    activations: Activations,
) -> jax.Array:
    ok, reason = supports(x_TI, w_OI, bias_O, out_dtype=out_dtype)
    if not ok:
        raise ValueError(f"linear: {reason}")
    if not isinstance(w_OI, PackedWeight):
        return xla_cpu.linear(x_TI, w_OI, bias_O, out_dtype=out_dtype)
    dtype = out_dtype or x_TI.dtype
    if not available()[0]:
        if activations == "int8":
            return int8.linear(x_TI, w_OI, bias_O, out_dtype=dtype)
        if activations == "bfloat16" and set(w_OI.formats) == {"bf16"}:
            x_TI = x_TI.astype(jnp.bfloat16)
        return xla_cpu.linear(x_TI.astype(jnp.float32), unpack(w_OI), bias_O).astype(dtype)
    bias = jnp.zeros(0, jnp.float32) if bias_O is None else bias_O.astype(jnp.float32)
    call = jax.ffi.ffi_call("jaxinfer_linear", jax.ShapeDtypeStruct((x_TI.shape[0], w_OI.shape[0]), dtype))
    return call(x_TI, bias, *w_OI.data, **_attributes(w_OI), activations=np.int64(CODES[activations]))


def rows(w: PackedWeight | jax.Array, token_ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the weight in ``dtype`` ``[T, I]``: the look-up of embeddings. Ids are clipped to the weight."""
    if not isinstance(w, PackedWeight):
        return xla_cpu.rows(w, token_ids_T, dtype)
    if not available()[0]:
        return jnp.take(unpack(w), token_ids_T, axis=0, mode="clip").astype(dtype)
    call = jax.ffi.ffi_call(
        "jaxinfer_linear_rows", jax.ShapeDtypeStruct((token_ids_T.shape[0], w.inputs), dtype)
    )
    return call(token_ids_T.astype(jnp.int32), *w.data, **_attributes(w))


def _attributes(w: PackedWeight) -> dict[str, NDArray[np.int64]]:
    formats = np.array([FORMATS[name].index for name in w.formats], np.int64)
    return {"formats": formats, "sizes": np.array(w.sizes, np.int64)}
