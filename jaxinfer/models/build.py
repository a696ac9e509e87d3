"""A model without its weights, and the way from a flat tuple of arrays to a module."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.registry import family
from pallas_kernels.ops import Ops
from sharding.axes import Axis


class AbstractModel(NamedTuple):
    """A model whose parameters are shapes only.

    Attributes:
        graphdef: the static structure, hashable.
        shapes: of each parameter by its path ("layers.0.attention.qkv.weight"), in the order of the leaves.
        merge: turns the flat tuple of arrays into the module. To be called inside a jitted function, so that
            plain arrays cross its boundary and the module exists only while it is traced.
    """

    graphdef: nnx.GraphDef
    shapes: dict[str, jax.ShapeDtypeStruct]
    merge: Callable[[tuple[jax.Array, ...]], DecoderLM]


def abstract_model(
    config: TransformerConfig,
    ops: Ops,
    dtype: jnp.dtype,
    *,
    param_dtype: jnp.dtype | None = None,
    max_model_len: int | None = None,
) -> AbstractModel:
    """Builds a model without allocating its parameters.

    Args:
        dtype: of the activations.
        param_dtype: of the weights; default ``dtype``.
        max_model_len: longest sequence to be served; default ``config.max_position``. See ``layers.rope``.
    """
    graphdef, flat = _abstract(config, ops, dtype, param_dtype, max_model_len)
    shapes = {path: p.get_value() for path, p in flat.items()}
    keys = [tuple(int(part) if part.isdigit() else part for part in path.split(".")) for path in flat]
    return AbstractModel(graphdef, shapes, partial(_merge, graphdef, keys))


def logical_axes(config: TransformerConfig, ops: Ops, dtype: jnp.dtype) -> dict[str, tuple[Axis, ...]]:
    """Logical axes of each parameter, by path.

    "vocab", "embed", "heads", "kv_heads", "mlp", "experts" and "expert_mlp" (the width of one expert) are what they
    say; "merged_heads" are heads behind the attention (see ``layers.shared_slots``). A dimension may be several parts,
    one behind the other: q, k and v, or gate and up. None is never sharded.
    """
    _, flat = _abstract(config, ops, dtype, None, None)
    return {path: p.get_metadata()["logical_axes"] for path, p in flat.items()}


def _abstract(
    config: TransformerConfig,
    ops: Ops,
    dtype: jnp.dtype,
    param_dtype: jnp.dtype | None,
    max_model_len: int | None,
) -> tuple[nnx.GraphDef, dict[str, nnx.Param]]:
    build = partial(
        family(config.architecture).build,
        config,
        ops,
        dtype=dtype,
        param_dtype=param_dtype or dtype,
        max_model_len=max_model_len or config.max_position,
    )
    graphdef, state = nnx.split(nnx.eval_shape(build))
    return graphdef, {".".join(map(str, path)): p for path, p in nnx.to_flat_state(state)}


def _merge(
    graphdef: nnx.GraphDef, keys: list[tuple[str | int, ...]], leaves: tuple[jax.Array, ...]
) -> DecoderLM:
    return nnx.merge(graphdef, nnx.from_flat_state(list(zip(keys, leaves, strict=True))))
