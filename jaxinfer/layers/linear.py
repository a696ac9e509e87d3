"""Linear layer and token embedding; weights are stored ``[out, in]``."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.ops import Ops


class Linear(nnx.Module):
    """``x @ weight.T + bias``.

    The weight is an array or a ``PackedWeight``: ``ops`` takes either.

    Args:
        axes: logical axes of the weight, (out, in); see ``models.build`` for the names.
        packable: whether the weight may be held in the form in which the checkpoint stores it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str | None, str | None],
        bias: bool,
        ops: Ops,
        param_dtype: jnp.dtype,
        packable: bool = True,
    ) -> None:
        self.ops = ops
        self.weight = nnx.Param(
            jnp.zeros((out_features, in_features), param_dtype), logical_axes=axes, packable=packable
        )
        self.bias = (
            nnx.Param(jnp.zeros((out_features,), param_dtype), logical_axes=axes[:1]) if bias else None
        )

    def __call__(self, x_TI: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        bias_O = None if self.bias is None else self.bias[...]
        return self.ops.linear(x_TI, self.weight.get_value(), bias_O, out_dtype=out_dtype)


class Embedding(nnx.Module):
    """Token embedding ``[V, D]``, which also computes the logits of models with tied embeddings."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        self.ops = ops
        self.weight = nnx.Param(
            jnp.zeros((vocab_size, hidden_size), param_dtype), logical_axes=("vocab", "embed"), packable=True
        )

    def __call__(self, token_ids_T: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
        """Embeddings ``[T, D]`` times ``scale``, first rounded to ``dtype`` as in ``transformers``."""
        x_TD = self.ops.rows(self.weight.get_value(), token_ids_T, dtype)
        return x_TD if scale == 1.0 else x_TD * jnp.asarray(scale, dtype)

    def logits(self, hidden_PD: jax.Array) -> jax.Array:
        """Float32 logits ``[P, V]``."""
        return self.ops.linear(hidden_PD, self.weight.get_value(), None, out_dtype=jnp.float32)
