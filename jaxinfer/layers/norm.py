"""Root mean square norm (Zhang and Sennrich, 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.ops import Ops
from pallas_kernels.rms_norm.reference import rms_norm


class RMSNorm(nnx.Module):
    """Normalises the last axis in float32 and multiplies by ``weight + offset``.

    The weight is kept in float32: it is small, and adding 1 in bfloat16 would cost it most of its digits.
    """

    def __init__(self, features: int, eps: float, offset: float, axis: str | None) -> None:
        self.eps = eps
        self.offset = offset
        self.weight = nnx.Param(jnp.zeros((features,), jnp.float32), logical_axes=(axis,))

    def factor(self) -> jax.Array:
        """What the normalised features are multiplied by, float32."""
        return self.weight[...] + self.offset

    def with_sum(
        self, ops: Ops, x_TD: jax.Array, residual_TD: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The norm of ``x + residual``, and the sum."""
        return ops.rms_norm(x_TD, self.factor(), residual_TD, eps=self.eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.factor(), eps=self.eps)[0]
