"""Root mean square norm by the native CPU library, for float32; other dtypes are XLA's."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.rms_norm import reference


def rms_norm(
    x_TD: jax.Array, factor_D: jax.Array, residual_TD: jax.Array | None = None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.rms_norm``."""
    if x_TD.ndim != 2 or x_TD.dtype != jnp.float32 or not library.available()[0]:
        return reference.rms_norm(x_TD, factor_D, residual_TD, eps=eps)
    like = jax.ShapeDtypeStruct(x_TD.shape, jnp.float32)
    nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
    residual = jnp.zeros(0, jnp.float32) if residual_TD is None else residual_TD
    call = jax.ffi.ffi_call("jaxinfer_rms_norm", (like, nothing if residual_TD is None else like))
    y_TD, sum_TD = call(x_TD, residual, factor_D.astype(jnp.float32), eps=np.float32(eps))
    return y_TD, x_TD if residual_TD is None else sum_TD
