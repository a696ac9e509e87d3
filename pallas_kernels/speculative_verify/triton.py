"""Verification of drafted tokens in Pallas-Triton: laws are read where they are needed and never written.

Three launches:

1. ``verify_walk``, one program per row: down the tree. A trial reads two logits, since the sums of the laws are known
   from sampling. Only a further child after a rejection of a sampled one needs a pass over the vocabulary.
2. ``verify_residual``, rows x tiles: masses of the residual law, by groups of 128 tokens, for rows that end with a
   rejection; the other programs return at once.
3. ``verify_draw``, one program per row: a group by its share of the mass, then a token of it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.pool_limits import offsets_fit
from pallas_kernels.sampling.reference import Draws
from pallas_kernels.sampling.triton import LOGITS, MAX_VOCAB
from pallas_kernels.sampling.triton_rows import GROUP, pick
from pallas_kernels.speculative_verify.reference import Verified, check_drafts
from pallas_kernels.speculative_verify.triton_walk import residual, residual_kernel, split_laws, walk_kernel
from pallas_kernels.speculative_verify.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call

MAX_NODES = 1024


def supports(
    logits_NV: jax.Array,
    target: Draws,
    draft_token_N: jax.Array,
    parent_N: jax.Array,
    node_start_Q: jax.Array,
    accept_uniform_N: jax.Array,
    residual_uniform_R: jax.Array,
    draft_logits_NV: jax.Array | None = None,
    draft: Draws | None = None,
    *,
    max_nodes: int,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if max_nodes > MAX_NODES:
        return False, f"{max_nodes} nodes in a row; at most {MAX_NODES} fit the registers of a program"
    if logits_NV.shape[1] > MAX_VOCAB:
        return (
            False,
            f"a vocabulary of {logits_NV.shape[1]} tokens; at most {MAX_VOCAB} fit the registers of a program",
        )
    for logits in (logits_NV, draft_logits_NV):
        if logits is None:
            continue
        if jnp.dtype(logits.dtype).name not in LOGITS:
            return False, f"logits are {logits.dtype}; allowed: {', '.join(LOGITS)}"
        ok, reason = offsets_fit(logits.shape, logits.dtype)
        if not ok:
            return False, reason
    return True, ""


def speculative_verify(
    logits_NV: jax.Array,
    target: Draws,
    draft_token_N: jax.Array,
    parent_N: jax.Array,
    node_start_Q: jax.Array,
    accept_uniform_N: jax.Array,
    residual_uniform_R: jax.Array,
    draft_logits_NV: jax.Array | None = None,
    draft: Draws | None = None,
    *,
    max_nodes: int,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> Verified:
    """See ``reference.speculative_verify``."""
    check_drafts(draft_logits_NV, draft)
    V = logits_NV.shape[1]
    R = node_start_Q.shape[0] - 1
    sampled = draft is not None
    choice = choice or choose(generation, R, V)
    groups = pl.cdiv(V, GROUP)
    width = max(1 << math.ceil(math.log2(groups)), choice.groups)
    row_i, row_f = (jax.ShapeDtypeStruct((R,), d) for d in (jnp.int32, jnp.float32))
    path = jax.ShapeDtypeStruct((R, 1 << math.ceil(math.log2(max_nodes))), jnp.int32)
    call = functools.partial(triton_call, num_stages=1, interpret=interpret)
    walk = call(
        functools.partial(walk_kernel, sampled=sampled, tile=choice.tile),
        grid=(R,),
        out_shape=(row_i, path, row_i, row_f, row_i),
        name="verify_walk",
        num_warps=choice.row_warps,
    )
    masses = call(
        functools.partial(residual_kernel, sampled=sampled, groups=choice.groups),
        grid=(R, pl.cdiv(groups, choice.groups)),
        out_shape=jax.ShapeDtypeStruct((R, width), jnp.float32),
        name="verify_residual",
        num_warps=choice.residual_warps,
    )
    draw = call(
        functools.partial(_draw_kernel, sampled=sampled),
        grid=(R,),
        out_shape=row_i,
        name="verify_draw",
        num_warps=choice.row_warps,
    )
    laws = _arrays(logits_NV, target)
    if draft_logits_NV is not None and draft is not None:
        laws += _arrays(draft_logits_NV, draft)
    tree = (draft_token_N, parent_N, node_start_Q)
    count_R, path_RD, last_R, factor_R, needed_R = walk(*laws, target.healthy_P, *tree, accept_uniform_N)
    end = (last_R, factor_R, needed_R)
    mass_RG = masses(*laws, *tree, *end)
    next_R = draw(*laws, *tree, *end, mass_RG, residual_uniform_R)
    return Verified(count_R, path_RD[:, : max_nodes - 1], next_R)


def _arrays(logits_NV: jax.Array, laws: Draws) -> tuple[jax.Array, ...]:
    return logits_NV, laws.token_P, laws.max_P, laws.temperature_P, laws.threshold_P, laws.mass_P


def _draw_kernel(*refs: Any, sampled: bool) -> None:
    """The token after the path: of the residual law, or the target's own.

    Args:
        refs: the laws as in ``walk_kernel``; draft_token_N, parent_N, node_start_Q, last_R, factor_R, needed_R,
            mass_RG, residual_uniform_R; output next_R.
    """
    target, draft, rest = split_laws(refs, sampled)
    *shared, last_R, factor_R, needed_R, mass_RG, residual_uniform_R, next_R = rest
    row = pl.program_id(0)
    last = plgpu.load(last_R.at[row])
    bonus = plgpu.load(target.token_N.at[last])
    start, end = (plgpu.load(shared[2].at[row + i]) for i in range(2))
    needed = plgpu.load(needed_R.at[row]) > 0

    @pl.when(~needed)
    def _() -> None:
        plgpu.store(next_R.at[row], jnp.where(end > start, bonus, 0))

    @pl.when(needed)
    def _() -> None:
        group_G = jnp.arange(mass_RG.shape[1])
        real_G = group_G < pl.cdiv(target.logits_NV.shape[1], GROUP)
        mass_G = plgpu.load(mass_RG.at[row, group_G], mask=real_G, other=0.0)
        mass = jnp.sum(mass_G)
        group, rest = pick(mass_G, plgpu.load(residual_uniform_R.at[row]) * mass)
        id_J = group * GROUP + jnp.arange(GROUP)
        inner, _ = pick(residual(target, draft, shared, row, last, plgpu.load(factor_R.at[row]), id_J), rest)
        plgpu.store(next_R.at[row], jnp.where(mass > 0, group * GROUP + inner, bonus))
