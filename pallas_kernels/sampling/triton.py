"""A draw from truncated softmax laws in Pallas-Triton: one pass over the logits of the whole batch, then only the
groups of tokens that matter.

Four launches:

1. ``sampling_stats``, rows x tiles: maximum and sum of weights of each group of 128 tokens; the only full read.
2. ``sampling_candidates``, one program per row: the groups that may hold kept tokens.
3. ``sampling_threshold``, one program per row: exact threshold among the candidates, and what is kept of each of them.
4. ``sampling_draw``, one program per row: a group by its share of the mass, then a token of it.

Programs of rows without truncation return from 2 and 3 at once. The first launch splits rows, so that a batch of one
fills the device as well; a sum over a row is always that of the same groups in the same order, whatever the tiles are.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.pool_limits import offsets_fit
from pallas_kernels.sampling.reference import Draws
from pallas_kernels.sampling.triton_rows import (
    GROUP,
    load_divisor,
    load_row,
    load_tokens,
    pick,
    stats_kernel,
)
from pallas_kernels.sampling.triton_truncate import candidates_kernel, threshold_kernel
from pallas_kernels.sampling.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call

LOGITS = ("float32", "bfloat16", "float16")
MAX_VOCAB = 1 << 19


def supports(
    logits_PV: jax.Array,
    uniform_P: jax.Array,
    temperature_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
    *,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if jnp.dtype(logits_PV.dtype).name not in LOGITS:
        return False, f"logits are {logits_PV.dtype}; allowed: {', '.join(LOGITS)}"
    if logits_PV.shape[1] > MAX_VOCAB:
        return (
            False,
            f"a vocabulary of {logits_PV.shape[1]} tokens; at most {MAX_VOCAB} fit the registers of a program",
        )
    return offsets_fit(logits_PV.shape, logits_PV.dtype)


def truncated_draw(
    logits_PV: jax.Array,
    uniform_P: jax.Array,
    temperature_P: jax.Array,
    top_k_P: jax.Array,
    top_p_P: jax.Array,
    min_p_P: jax.Array,
    *,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> Draws:
    """See ``reference.truncated_draw``."""
    P, V = logits_PV.shape
    choice = choice or choose(generation, P, V)
    groups = pl.cdiv(V, GROUP)
    width = max(1 << math.ceil(math.log2(groups)), choice.groups, choice.chunk)
    row_i, row_f, row_b = (jax.ShapeDtypeStruct((P,), d) for d in (jnp.int32, jnp.float32, jnp.bool_))
    group_i, group_f = (jax.ShapeDtypeStruct((P, width), d) for d in (jnp.int32, jnp.float32))
    call = functools.partial(triton_call, num_stages=1, interpret=interpret)

    stats = call(
        functools.partial(stats_kernel, groups=choice.groups),
        grid=(P, pl.cdiv(groups, choice.groups)),
        out_shape=(group_f, group_f),
        name="sampling_stats",
        num_warps=choice.stats_warps,
    )
    candidates = call(
        functools.partial(candidates_kernel, V=V),
        grid=(P,),
        out_shape=(group_i, row_i, row_f),
        name="sampling_candidates",
        num_warps=choice.row_warps,
    )
    threshold = call(
        functools.partial(threshold_kernel, chunk=choice.chunk),
        grid=(P,),
        out_shape=(row_f, group_f),
        name="sampling_threshold",
        num_warps=choice.row_warps,
    )
    draw = call(
        _draw_kernel,
        grid=(P,),
        out_shape=(row_i, row_b, row_f, row_f),
        name="sampling_draw",
        num_warps=choice.row_warps,
    )
    temperature_P = temperature_P.astype(jnp.float32)
    max_PG, sum_PG = stats(logits_PV, temperature_P)
    list_PG, count_P, floor_P = candidates(temperature_P, top_k_P, top_p_P, min_p_P, max_PG, sum_PG)
    threshold_P, kept_PG = threshold(
        logits_PV, temperature_P, top_k_P, top_p_P, max_PG, sum_PG, list_PG, count_P, floor_P
    )
    token_P, healthy_P, max_P, mass_P = draw(
        logits_PV, uniform_P, temperature_P, max_PG, sum_PG, list_PG, count_P, threshold_P, kept_PG
    )
    return Draws(token_P, healthy_P, max_P, temperature_P, threshold_P, mass_P)


def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_PV,
    uniform_P,
    temperature_P,
    max_PG,
    sum_PG,
    list_PG,
    count_P,
    threshold_P,
    kept_PG,
    token_P,
    healthy_P,
    max_P,
    mass_P,
) -> None:
    """A group by its share of the mass that is kept, then a token of it; or the first largest logit."""
    row = pl.program_id(0)
    divisor = load_divisor(temperature_P, row)
    random = plgpu.load(temperature_P.at[row]) > 0
    max_G, mass_G, top, healthy = load_row(max_PG, sum_PG, divisor, row, pl.cdiv(logits_PV.shape[1], GROUP))
    count = plgpu.load(count_P.at[row])
    group_G = jnp.arange(max_PG.shape[1])
    kept_G = plgpu.load(kept_PG.at[row, group_G], mask=group_G < count, other=0.0)
    mass_G = jnp.where(count > 0, kept_G, mass_G)
    mass = jnp.sum(mass_G)
    place, rest = pick(mass_G, plgpu.load(uniform_P.at[row]) * mass)
    listed = plgpu.load(list_PG.at[row, place], mask=place < count, other=0)
    drawn = jnp.where(count > 0, listed, place)
    first = jnp.min(jnp.where(max_G == top, group_G, group_G.shape[0] - 1))
    group = jnp.where(random, drawn, first)

    inner_J = jnp.arange(GROUP)
    logits_J = load_tokens(logits_PV, row, group * GROUP + inner_J)
    kept_J = logits_J >= plgpu.load(threshold_P.at[row])
    inner, _ = pick(jnp.where(kept_J, jnp.exp((logits_J - top) / divisor), 0.0), rest)
    first = jnp.min(jnp.where(logits_J == top, inner_J, GROUP - 1))
    token = group * GROUP + jnp.where(random, inner, first)
    plgpu.store(token_P.at[row], jnp.where(healthy, token, 0))
    plgpu.store(healthy_P.at[row], healthy)
    plgpu.store(max_P.at[row], top)
    plgpu.store(mass_P.at[row], mass)
