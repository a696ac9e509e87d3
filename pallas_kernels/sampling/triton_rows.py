"""What the sampling kernels share: a row as groups of 128 tokens, their statistics, and a pick by share of a mass."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

GROUP = 128

Row = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def group_tokens(group_B: jax.Array) -> jax.Array:
    """Token ids of groups, [B, 128]."""
    return group_B[:, None] * GROUP + jnp.arange(GROUP)[None, :]


def load_tokens(
    logits_PV: Any, row: jax.Array, token_X: jax.Array, real_X: jax.Array | None = None
) -> jax.Array:
    """Logits of tokens of a row in float32; -inf for those beyond the vocabulary or not ``real``."""
    mask_X = token_X < logits_PV.shape[1]
    if real_X is not None:
        mask_X &= real_X
    return plgpu.load(logits_PV.at[row, token_X], mask=mask_X, other=-jnp.inf).astype(jnp.float32)


def load_divisor(temperature_P: Any, row: jax.Array) -> jax.Array:
    """The temperature of a row, 1 where it is greedy."""
    temperature = plgpu.load(temperature_P.at[row])
    return jnp.where(temperature > 0, temperature, 1.0)


def load_row(max_PG: Any, sum_PG: Any, divisor: jax.Array, row: jax.Array, groups: int) -> Row:
    """Statistics of a row: largest logit of each group, sum of weights of each group, largest logit of the row, and
    whether it is healthy. What follows the ``groups`` of the vocabulary has -inf and 0; an unhealthy row has 0."""
    group_G = jnp.arange(max_PG.shape[1])
    max_G = plgpu.load(max_PG.at[row, group_G], mask=group_G < groups, other=-jnp.inf)
    sum_G = plgpu.load(sum_PG.at[row, group_G], mask=group_G < groups, other=0.0)
    bad = jnp.max(jnp.where(sum_G >= 0, 0, 1))
    top = jnp.max(max_G)
    healthy = (bad == 0) & (top > -jnp.inf)
    top = jnp.where(healthy, top, 0.0)
    max_G = jnp.where(healthy, max_G, 0.0)
    mass_G = jnp.where(healthy, sum_G * jnp.exp((max_G - top) / divisor), 0.0)
    return max_G, mass_G, top, healthy


def pick(mass_X: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First entry of positive mass whose prefix sum exceeds the target, and what the entries before it leave of the
    target. Rounding may leave no such entry; then the last one of positive mass."""
    size = mass_X.shape[0]
    index_X = jnp.arange(size)
    prefix_X = jnp.cumsum(mass_X)
    positive_X = mass_X > 0
    first = jnp.min(jnp.where(positive_X & (prefix_X > target), index_X, size))
    last = jnp.max(jnp.where(positive_X, index_X, 0))
    index = jnp.minimum(first, last)
    return index, target - jnp.sum(jnp.where(index_X == index - 1, prefix_X, 0.0))


def stats_kernel(logits_PV, temperature_P, max_PG, sum_PG, *, groups: int) -> None:  # type: ignore[no-untyped-def]
    """Largest logit of each group of a tile, and the sum of its weights relative to that. NaN marks a group with a
    logit that is NaN or +inf."""
    row = pl.program_id(0)
    divisor = load_divisor(temperature_P, row)
    group_B = pl.program_id(1) * groups + jnp.arange(groups)
    logits_BJ = load_tokens(logits_PV, row, group_tokens(group_B))
    fine_BJ = logits_BJ < jnp.inf
    logits_BJ = jnp.where(fine_BJ, logits_BJ, -jnp.inf)
    max_B = jnp.max(logits_BJ, axis=1)
    shift_B = jnp.where(max_B > -jnp.inf, max_B, 0.0)
    sum_B = jnp.sum(jnp.exp((logits_BJ - shift_B[:, None]) / divisor), axis=1)
    bad_B = jnp.max(jnp.where(fine_BJ, 0, 1), axis=1)
    plgpu.store(max_PG.at[row, group_B], max_B)
    plgpu.store(sum_PG.at[row, group_B], jnp.where(bad_B > 0, jnp.nan, sum_B))
