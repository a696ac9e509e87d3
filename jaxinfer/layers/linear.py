"""Linear layer and token embedding; weights are stored ``[out, in]``."""

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.ops import Ops
from sharding.axes import Axis, Part

VOCAB_UNIT = 128
"""A device's share of the vocabulary is a multiple of so many tokens: the sampler cuts the vocabulary into groups of
this size, which must not be cut by the border between two devices."""


def vocab_axis(vocab_size: int) -> tuple[Part, ...]:
    """The dimension of a weight that counts tokens of the vocabulary."""
    return (Part("vocab", vocab_size, unit=VOCAB_UNIT),)


class Linear(nnx.Module):
    """``x @ weight.T + bias``.

    The weight is an array or a ``PackedWeight``: ``ops`` takes either. Where several devices share it, each computes
    its outputs if they share the outputs, and all compute the sum of their products if they share the inputs.

    Args:
        in_features, out_features: of the whole weight.
        axes: logical axes of the weight, (out, in); see ``models.build`` for the names.
        packable: whether the weight may be held in the form in which the checkpoint stores it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[Axis, str | None],
        bias: bool,
        ops: Ops,
        param_dtype: jnp.dtype,
        packable: bool = True,
    ) -> None:
        self.ops = ops
        self.summed = axes[1]
        O, I = ops.shards.local(axes[0], out_features), ops.shards.local(axes[1], in_features)
        self.weight = nnx.Param(jnp.zeros((O, I), param_dtype), logical_axes=axes, packable=packable)
        self.bias = nnx.Param(jnp.zeros((O,), param_dtype), logical_axes=axes[:1]) if bias else None

    def __call__(
        self, x_TI: jax.Array, out_dtype: jnp.dtype | None = None, split_rows: bool = False
    ) -> jax.Array:
        """Args:
        split_rows: the sum over devices that share the inputs goes to each for its own rows only.
        """
        bias_O = None if self.bias is None else self.bias[...]
        if self.ops.shards.size(self.summed) == 1:
            assert not split_rows, "each device has the whole product"
            return self.ops.linear(x_TI, self.weight.get_value(), bias_O, out_dtype=out_dtype)
        y_TO = self.ops.linear(x_TI, self.weight.get_value(), None, out_dtype=out_dtype)
        y_TO = self.ops.shards.sum(y_TO, self.summed, split_rows=split_rows)
        return y_TO if bias_O is None else y_TO + bias_O.astype(y_TO.dtype)


class Embedding(nnx.Module):
    """Token embedding ``[V, D]``, which also computes the logits of models with tied embeddings."""

    def __init__(self, vocab_size: int, hidden_size: int, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        self.ops = ops
        axis = vocab_axis(vocab_size)
        self.weight = nnx.Param(
            jnp.zeros((ops.shards.local(axis, vocab_size), hidden_size), param_dtype),
            logical_axes=(axis, "embed"),
            packable=True,
        )

    def __call__(self, token_ids_T: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
        """Embeddings ``[T, D]`` times ``scale``, first rounded to ``dtype`` as in ``transformers``."""
        x_TD = self._rows(token_ids_T, dtype)
        return x_TD if scale == 1.0 else x_TD * jnp.asarray(scale, dtype)

    def _rows(self, token_ids_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Rows of tokens; where devices share the vocabulary, one of them has the row and the others add 0."""
        shards, weight = self.ops.shards, self.weight.get_value()
        if shards.size("vocab") == 1:
            return self.ops.rows(weight, token_ids_T, dtype)
        row_T = token_ids_T - shards.index("vocab") * weight.shape[0]
        mine_T1 = ((row_T >= 0) & (row_T < weight.shape[0]))[:, None]
        x_TD = self.ops.rows(weight, jnp.clip(row_T, 0, weight.shape[0] - 1), dtype)
        return shards.sum(jnp.where(mine_T1, x_TD, 0), "vocab")

    def logits(self, hidden_PD: jax.Array) -> jax.Array:
        """Float32 logits ``[P, V]``, of this device's share of the vocabulary."""
        return self.ops.linear(hidden_PD, self.weight.get_value(), None, out_dtype=jnp.float32)
