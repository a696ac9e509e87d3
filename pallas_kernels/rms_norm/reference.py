"""Root mean square norm, of a sum if there is a residual: the semantics, and XLA's formulation."""

import jax
import jax.numpy as jnp


def rms_norm(
    x_TD: jax.Array, factor_D: jax.Array, residual_TD: jax.Array | None = None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Normalises ``x + residual`` over the last axis in float32 (Zhang and Sennrich, 2019).

    Args:
        factor_D: float32; what normalised features are multiplied by, an offset of the weight included.
        residual_TD: of the dtype of x; None: nothing is added.

    Returns:
        The normalised rows and the sum, both in the dtype of x.
    """
    sum_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = sum_TD.astype(jnp.float32)
    inverse_T1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    return (wide_TD * inverse_T1 * factor_D).astype(x_TD.dtype), sum_TD
