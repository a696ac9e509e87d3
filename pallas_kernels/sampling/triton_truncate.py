"""Truncation of a row in two kernels: the groups of tokens that matter, then the exact threshold among them.

Group statistics bound the threshold from below. A group whose largest logit lies below the bound holds no token that is
kept, so the search reads the others only: about k groups for top-k, and those of the nucleus for top-p.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.sampling.search import Measured, largest_reaching
from pallas_kernels.sampling.triton_rows import GROUP, group_tokens, load_divisor, load_row, load_tokens

State = tuple[jax.Array, ...]

# The bound of a nucleus is looked for up to this many temperatures below the largest logit, in so many halvings.
_DEEPEST, _HALVINGS = 40.0, 12
# Share of the mass outside the nucleus that the bound may cut off: the rest covers rounding.
_CUT = 0.99


def candidates_kernel(  # type: ignore[no-untyped-def]
    temperature_P, top_k_P, top_p_P, min_p_P, max_PG, sum_PG, list_PG, count_P, floor_P, *, V: int
) -> None:
    """Lists the groups, in id order, that may hold a kept token; none if the row is not truncated. ``floor`` is the
    smallest logit that min-p keeps."""
    row = pl.program_id(0)
    top_k, top_p, min_p = (plgpu.load(ref.at[row]) for ref in (top_k_P, top_p_P, min_p_P))
    divisor = load_divisor(temperature_P, row)
    max_G, mass_G, top, healthy = load_row(max_PG, sum_PG, divisor, row, pl.cdiv(V, GROUP))
    floor = jnp.where(min_p > 0, top + divisor * jnp.log(min_p), -jnp.inf)
    plgpu.store(floor_P.at[row], floor)
    k_on, p_on = top_k < V, top_p < 1
    truncated = healthy & (plgpu.load(temperature_P.at[row]) > 0) & (k_on | p_on | (min_p > 0))
    kth = _kth_group(max_G, top_k, jnp.where(truncated & k_on, -jnp.inf, top), top)
    nucleus = _nucleus_bound(max_G, mass_G, top, divisor, top_p, truncated & p_on & ~k_on)
    # Top-p counts what top-k left, so what min-p drops matters as long as both are on.
    low = jnp.where(k_on, kth, jnp.maximum(nucleus, floor))
    low = jnp.where(k_on & ~p_on, jnp.maximum(kth, floor), low)
    low = jnp.where(truncated, low, jnp.inf)
    group_G = jnp.arange(max_PG.shape[1])
    chosen_G = (max_G >= low) & (group_G < pl.cdiv(V, GROUP))
    before_G = jnp.cumsum(jnp.where(chosen_G, 1, 0))
    count = jnp.max(before_G)
    # The others come after them, so that every place is written once.
    place_G = jnp.where(chosen_G, before_G - 1, count + group_G - before_G)
    plgpu.store(list_PG.at[row, place_G], group_G)
    plgpu.store(count_P.at[row], count)


def _kth_group(max_G: jax.Array, k: jax.Array, low: jax.Array, top: jax.Array) -> jax.Array:
    """The k-th largest group maximum, -inf if there are fewer: k groups hold a logit as large."""

    def measure(pivot: jax.Array) -> Measured:
        above_G = max_G >= pivot
        return (
            jnp.sum(jnp.where(above_G, 1, 0)),
            jnp.min(jnp.where(above_G, max_G, jnp.inf)),
            jnp.max(jnp.where(above_G, -jnp.inf, max_G)),
        )

    return largest_reaching(measure, k, low, top)


def _nucleus_bound(
    max_G: jax.Array, mass_G: jax.Array, top: jax.Array, divisor: jax.Array, top_p: jax.Array, on: jax.Array
) -> jax.Array:
    """A logit below which lies less than the mass that top-p drops; -inf if none is found or top-p is not ``on``.

    Of a group with its largest logit above it, at most 127 tokens lie below, each with less than its weight, and
    together with no more than the group's mass without its largest token.
    """
    allowed = _CUT * (1 - top_p) * jnp.sum(mass_G)
    others_G = jnp.maximum(mass_G - jnp.exp((max_G - top) / divisor), 0.0)

    def fits(depth: jax.Array) -> jax.Array:
        below_G = jnp.minimum(others_G, (GROUP - 1) * jnp.exp(-depth))
        return jnp.sum(jnp.where(max_G >= top - depth * divisor, below_G, mass_G)) <= allowed

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        near, far = ends
        middle = (near + far) / 2
        enough = fits(middle)
        return jnp.where(enough, near, middle), jnp.where(enough, middle, far)

    ends = (jnp.zeros_like(top), jnp.full_like(top, _DEEPEST))
    _, far = lax.fori_loop(0, on.astype(jnp.int32) * _HALVINGS, halve, ends)
    return jnp.where(on & fits(far), top - far * divisor, -jnp.inf)


@dataclass(frozen=True)
class Listed:
    """The listed groups of a row, read ``chunk`` at a time."""

    logits_PV: Any
    list_PG: Any
    row: jax.Array
    count: jax.Array
    chunk: int

    def fold(self, step: Callable[[jax.Array, jax.Array, jax.Array, State], State], start: State) -> State:
        """Applies ``step`` to each chunk: places in the list, which of them exist, logits [chunk, 128], state."""

        def body(i: jax.Array, state: State) -> State:
            place_C = i * self.chunk + jnp.arange(self.chunk)
            real_C = place_C < self.count
            group_C = plgpu.load(self.list_PG.at[self.row, place_C], mask=real_C, other=0)
            logits_CJ = load_tokens(self.logits_PV, self.row, group_tokens(group_C), real_C[:, None])
            return step(place_C, real_C, logits_CJ, state)

        return lax.fori_loop(0, (self.count + self.chunk - 1) // self.chunk, body, start)

    def measure(self, pivot: jax.Array, amount: Callable[[jax.Array], jax.Array]) -> Measured:
        """Amount of the logits not below a pivot, the smallest of them, and the largest below it."""

        def step(_: jax.Array, __: jax.Array, logits_CJ: jax.Array, state: State) -> State:
            sum_C, min_C, max_C = state
            above_CJ = logits_CJ >= pivot
            return (
                sum_C + jnp.sum(jnp.where(above_CJ, amount(logits_CJ), 0.0), axis=1),
                jnp.minimum(min_C, jnp.min(jnp.where(above_CJ, logits_CJ, jnp.inf), axis=1)),
                jnp.maximum(max_C, jnp.max(jnp.where(above_CJ, -jnp.inf, logits_CJ), axis=1)),
            )

        start = (jnp.full(self.chunk, 0.0), jnp.full(self.chunk, jnp.inf), jnp.full(self.chunk, -jnp.inf))
        sum_C, min_C, max_C = self.fold(step, start)
        return jnp.sum(sum_C), jnp.min(min_C), jnp.max(max_C)


def threshold_kernel(  # type: ignore[no-untyped-def]
    logits_PV,
    temperature_P,
    top_k_P,
    top_p_P,
    max_PG,
    sum_PG,
    list_PG,
    count_P,
    floor_P,
    threshold_P,
    kept_PG,
    *,
    chunk: int,
) -> None:
    """The threshold of a row, and the mass that is kept of each listed group, in the order of the list. Without a list
    no search makes a step, so the program ends at once."""
    row = pl.program_id(0)
    count = plgpu.load(count_P.at[row])
    listed = Listed(logits_PV, list_PG, row, count, chunk)
    divisor = load_divisor(temperature_P, row)
    _, mass_G, top, _ = load_row(max_PG, sum_PG, divisor, row, pl.cdiv(logits_PV.shape[1], GROUP))

    def weigh(logits_CJ: jax.Array) -> jax.Array:
        return jnp.exp((logits_CJ - top) / divisor)

    top_k, top_p = plgpu.load(top_k_P.at[row]), plgpu.load(top_p_P.at[row])
    k_on, p_on = (count > 0) & (top_k < logits_PV.shape[1]), (count > 0) & (top_p < 1)
    low = jnp.where(k_on, -jnp.inf, top)
    # Counts are exact in float32: a vocabulary has less than 2**24 tokens.
    kth = largest_reaching(lambda x: listed.measure(x, jnp.ones_like), top_k.astype(jnp.float32), low, top)
    kth = jnp.where(k_on, kth, -jnp.inf)
    need = top_p * jnp.where(k_on, listed.measure(kth, weigh)[0], jnp.sum(mass_G))
    low = jnp.where(p_on, kth, top)
    nucleus = largest_reaching(lambda x: listed.measure(x, weigh), need, low, top)
    bound = jnp.maximum(kth, jnp.where(p_on, nucleus, -jnp.inf))
    bound = jnp.maximum(bound, plgpu.load(floor_P.at[row]))

    def keep(place_C: jax.Array, real_C: jax.Array, logits_CJ: jax.Array, state: State) -> State:
        kept_CJ = logits_CJ >= bound
        kept_C = jnp.sum(jnp.where(kept_CJ, weigh(logits_CJ), 0.0), axis=1)
        plgpu.store(kept_PG.at[row, place_C], kept_C, mask=real_C)
        return (jnp.minimum(state[0], jnp.min(jnp.where(kept_CJ, logits_CJ, jnp.inf), axis=1)),)

    (smallest_C,) = listed.fold(keep, (jnp.full(chunk, jnp.inf),))
    cut = (count > 0) & (bound > -jnp.inf)
    plgpu.store(threshold_P.at[row], jnp.where(cut, jnp.min(smallest_C), -jnp.inf))
