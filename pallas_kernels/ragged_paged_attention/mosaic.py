"""Ragged paged attention for prefill on Hopper: Pallas on Mosaic GPU, with TMA copies and wgmma.

Rows of more than one token are cut into tiles of 128 rows of scores for ``mosaic_kernel``. Rows of one token would
fill an eighth of such a tile, so they go to the Triton backend, which splits their contexts; its small result is
scattered into the tiles' in place. Both see the same batch, and the rows of the other one are empty to them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.ragged_paged_attention import triton
from pallas_kernels.ragged_paged_attention.mosaic_kernel import attend_tiles
from pallas_kernels.ragged_paged_attention.mosaic_problem import Problem
from pallas_kernels.ragged_paged_attention.mosaic_tiles import UNIT_TOKENS, tile_list
from pallas_kernels.ragged_paged_attention.mosaic_tuning import Choice, choose

DTYPES = (jnp.float16, jnp.bfloat16)
# At 256 the accumulators do not fit the registers.
HEAD_WIDTHS = (64, 128)
OLDEST_JAX = (0, 11)
# Slots of a block: 8 rows are the unit of the swizzled layout, and a page must fill a step or divide it.
BLOCK_SLOTS = (8, 16, 32, 64, 128, 256)


def supports(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if jax.__version_info__ < OLDEST_JAX:
        return False, f"jax {jax.__version__}; Mosaic GPU attention needs 0.11 or newer"
    if generation != "hopper":
        return False, f"GPUs of the {generation} generation; the kernel is made of Hopper's TMA and wgmma"
    if ancestors_TU is not None:
        return False, "tree masks of drafts"
    if sinks_H is not None:
        return False, "attention sinks"
    if scale <= 0:
        return False, f"scale {scale}; supported: greater than 0"
    dtypes = {jnp.dtype(x.dtype) for x in (q_THh, k_NKSh, v_NKSh)}
    if (
        len(dtypes) > 1
        or dtypes.pop() not in map(jnp.dtype, DTYPES)
        or k_scale_K is not None
        or v_scale_K is not None
    ):
        return False, (
            f"queries of {q_THh.dtype}, KV cache of {k_NKSh.dtype}, {v_NKSh.dtype}; supported: float16 or bfloat16 "
            "for all three, without scales"
        )
    (_, H, h), (_, K, S, _) = q_THh.shape, k_NKSh.shape
    if h not in HEAD_WIDTHS:
        return False, f"head width {h}; supported: {', '.join(map(str, HEAD_WIDTHS))}"
    if S not in BLOCK_SLOTS:
        return False, f"blocks of {S} slots; supported: {', '.join(map(str, BLOCK_SLOTS))}"
    if H % K:
        return False, f"{H} query heads are not a multiple of {K} KV heads"
    fits, reason = triton.supports(
        q_THh, k_NKSh, v_NKSh, block_table_RM, query_start_Q, context_len_R,
        scale=scale, window=window, soft_cap=soft_cap, generation=generation,
    )  # fmt: skip
    return fits, reason and f"rows of one token: {reason}"


def ragged_paged_attention(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: jax.Array | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.ragged_paged_attention``; what ``supports`` refuses is not computed.

    Args:
        interpret: run in the interpreters of Pallas, with the detection of races, on any device.
    """
    T, H, h = q_THh.shape
    N, K, S, _ = k_NKSh.shape
    R, M = block_table_RM.shape
    if choice is None:
        choice = choose(generation, triton.facts(q_THh, k_NKSh, block_table_RM, window))
    problem = Problem(
        H // K, N, S, M, h, scale, window, soft_cap, choice.slots, choice.stages, choice.loader_registers
    )
    # TMA wants whole groups of tokens. Buckets of tokens are multiples of 8, so that this copies nothing.
    padded = -(-max(T, 1) // UNIT_TOKENS) * UNIT_TOKENS
    q_THh = jnp.pad(q_THh, ((0, padded - T), (0, 0), (0, 0)))
    out_THh = attend_tiles(
        problem,
        q_THh,
        k_NKSh,
        v_NKSh,
        block_table_RM,
        tile_list(query_start_Q, context_len_R, padded, H // K, window),
        _interpreter() if interpret else None,
    )[:T]
    single_R = query_start_Q[1:] - query_start_Q[:-1] == 1
    one_RHh = triton.ragged_paged_attention(
        jnp.take(q_THh, query_start_Q[:-1], axis=0, mode="clip"),
        k_NKSh,
        v_NKSh,
        block_table_RM,
        jnp.arange(R + 1, dtype=jnp.int32),
        jnp.where(single_R, context_len_R, 0),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        generation=generation,
        interpret=interpret,
    )
    token_R = jnp.where(single_R, query_start_Q[:-1], T + jnp.arange(R))
    return out_THh.at[token_R].set(one_RHh, mode="drop", unique_indices=True)


def _interpreter() -> Any:
    # Types are checked with an older jax, which has no such thing.
    return plgpu.InterpretGPUParams(detect_races=True)  # type: ignore[attr-defined]
