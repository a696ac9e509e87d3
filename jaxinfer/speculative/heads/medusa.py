"""Medusa: heads that each predict one more token from one hidden state (Cai et al. 2024, arXiv:2401.10774).

Head k is residual blocks on the target's final hidden state and an output matrix of its own, or the target's. The heads
do not see each other's tokens; the Cartesian product of their best guesses makes the tree (see ``speculative.trees``).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.layers.linear import Linear
from jaxinfer.models.segments import Leaves, ModulePart, Ropes, abstract_part, shapes_of
from jaxinfer.speculative.heads.config import MedusaConfig
from jaxinfer.speculative.heads.head import PREFIX, DraftHead, TargetLogits
from jaxinfer.speculative.heads.layers import ResidualBlock
from pallas_kernels.ops import Ops


class MedusaHead(nnx.Module):
    """One head."""

    def __init__(self, config: MedusaConfig, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        D = config.hidden_size
        self.blocks = nnx.List(
            [
                ResidualBlock(D, bias=config.block_bias, ops=ops, param_dtype=param_dtype)
                for _ in range(config.num_blocks)
            ]
        )
        self.output = (
            None
            if config.shared_output
            else Linear(
                D,
                config.draft_vocab_size,
                axes=("vocab", "embed"),
                bias=False,
                ops=ops,
                param_dtype=param_dtype,
            )
        )

    def __call__(self, feature_PD: jax.Array, target_logits: TargetLogits) -> jax.Array:
        """Float32 logits ``[P, Vd]``."""
        x_PD = feature_PD
        for block in self.blocks:
            x_PD = block(x_PD)
        if self.output is None:
            return target_logits(x_PD)
        return self.output(x_PD, out_dtype=jnp.dtype(jnp.float32))


class Medusa(nnx.Module):
    """All heads."""

    def __init__(self, config: MedusaConfig, *, ops: Ops, param_dtype: jnp.dtype) -> None:
        self.heads = nnx.List(
            [MedusaHead(config, ops=ops, param_dtype=param_dtype) for _ in range(config.num_heads)]
        )


def medusa_head(
    config: MedusaConfig, ops: Ops, *, param_dtype: jnp.dtype, vocab_map: np.ndarray | None = None
) -> DraftHead:
    """Describes Medusa heads.

    Args:
        vocab_map: as ``DraftHead.vocab_map``.
    """
    params: dict[str, nnx.Param] = {}
    module = nnx.eval_shape(lambda: Medusa(config, ops=ops, param_dtype=param_dtype))
    part, _ = abstract_part(module, PREFIX, params)
    return DraftHead(
        method="medusa",
        shapes=shapes_of(params),
        feature_layers=(),
        kv_specs=(),
        embed=None,
        fuse=_as_it_is,
        rope_tables=_no_ropes,
        forward=None,
        logits=partial(_logits, part),
        num_heads=config.num_heads,
        draft_vocab_size=config.draft_vocab_size,
        vocab_map=vocab_map,
    )


def _as_it_is(leaves: Leaves, features_TD: jax.Array) -> jax.Array:
    return features_TD


def _no_ropes(batch: ForwardBatch) -> Ropes:
    return ()


def _logits(
    part: ModulePart, leaves: Leaves, target_logits: TargetLogits, feature_PD: jax.Array
) -> jax.Array:
    medusa = part.merge(leaves)
    assert isinstance(medusa, Medusa)
    return jnp.stack([head(feature_PD, target_logits) for head in medusa.heads], axis=1)
