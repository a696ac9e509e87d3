"""Ragged paged attention in Pallas-Triton.

One kernel serves everything: a program computes a tile (consecutive tokens of a row, the query heads of one KV head)
over a share of the row's context. It is launched with two shapes of tiles:

* decode: one token. As few registers as that takes, so that several programs on each multiprocessor keep enough loads
  in flight; long contexts of few rows are split, and the shares merged.
* tiles: 16 to 64 queries, for rows with two tokens or more. K and V are read once for all of them.

A step with no more tokens than rows (the decode steps of an engine, padding included) is one decode launch with a
program per token, exact for any batch: a token finds its row, and is its own causal limit. Every other step is a pair:
tiles for the rows with two tokens or more, then decodes of the others, in place into the same output. Programs without
work exit after one load.

Why not one launch for a mixed batch: it would compute decodes with the registers and shared memory of tiles. Compiled
for H200 (head width 128, bfloat16), a decode takes 92 registers a thread and 67 KB for two chunks in flight, so three
programs share a multiprocessor and split contexts; a tile of 64 queries takes 156, and a decode would use 4 of its 64
queries. The price of the pair is one more launch, about 3 us. Not measured on a GPU yet.

Products are of the type of the queries with float32 sums; 1-byte K and V are converted exactly, their scales applied to
scores and outputs. float32 products are not rounded to TF32. A row's result depends on the choice alone, not on its
neighbours: shares are cut by the row's own context, and merged in order.

Method: FlashAttention (Dao et al. 2022, arXiv:2205.14135) over a paged cache (Kwon et al. 2023, arXiv:2309.06180), with
the split contexts of Flash-Decoding (Dao et al. 2023). A share of a context, for devices that hold parts of it, is the
same with limits that count this device's slots.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.pool_limits import offsets_fit
from pallas_kernels.ragged_paged_attention import triton_plan
from pallas_kernels.ragged_paged_attention.shares import Share
from pallas_kernels.ragged_paged_attention.triton_kernel import (
    Inputs,
    Partial,
    Scoring,
    attend,
    output_of,
    tokens_per_tile,
)
from pallas_kernels.ragged_paged_attention.triton_merge import merge
from pallas_kernels.ragged_paged_attention.triton_plan import Tiles
from pallas_kernels.ragged_paged_attention.tuning import Choice, Facts, Launch, choose

POOL_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
QUERY_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
MAX_HEAD_WIDTH = 256


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
    """See ``reference.ragged_paged_attention``."""
    return _attention(
        (q_THh, k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        (sinks_H, k_scale_K, v_scale_K, ancestors_TU),
        Scoring(scale, window, soft_cap),
        None,
        choice or choose(generation, facts(q_THh, k_NKSh, block_table_RM, window)),
        interpret,
    )


def ragged_paged_attention_share(
    q_THh: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    share: Share,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.ragged_paged_attention_share``."""
    out_THe = _attention(
        (q_THh, k_NKSh, v_NKSh),
        (block_table_RM, query_start_Q, context_len_R),
        (None, k_scale_K, v_scale_K, ancestors_TU),
        Scoring(scale, window, soft_cap),
        share,
        choice or choose(generation, facts(q_THh, k_NKSh, block_table_RM, window)),
        interpret,
    )
    return out_THe[..., :-1], out_THe[..., -1]


def _attention(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array, jax.Array],
    optional: tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None],
    scoring: Scoring,
    share: Share | None,
    choice: Choice,
    interpret: bool,
) -> jax.Array:
    """``triton_kernel.output_of`` of all tokens.

    Args:
        arrays: queries and pools.
        rows: block table, query starts and context lengths.
        optional: sinks, scales of K and V, and tree masks.
    """
    (q_THh, k_NKSh, v_NKSh), (block_table_RM, query_start_Q, context_len_R) = arrays, rows
    T, H, _ = q_THh.shape
    _, K, S, _ = k_NKSh.shape
    R = context_len_R.shape[0]

    def slots_before(position: jax.Array) -> jax.Array:
        return position if share is None else share.slots_before(position, S)

    tokens, row_T = triton_plan.plan_tokens(
        T, query_start_Q, context_len_R, optional[-1], scoring.window, slots_before
    )
    index_1 = None if share is None else jnp.asarray(share.index, jnp.int32)[None]
    shares = 1 if share is None else share.count

    def run(tiles: Tiles, launch: Launch, per_tile: int, out_THh: jax.Array | None) -> jax.Array:
        inputs = Inputs(q_THh, k_NKSh, v_NKSh, block_table_RM, tokens, tiles, *optional, index_1)
        out = attend(inputs, scoring, launch, per_tile, shares, out_THh, interpret)
        if isinstance(out, Partial):
            return merge(out, tiles, per_tile, output_of(inputs), out_THh, interpret)
        return out

    if T <= R:
        return run(triton_plan.one_token_tiles(row_T, query_start_Q, context_len_R), choice.decode, 1, None)
    per_tile = tokens_per_tile(choice.tiles, H // K)
    out_THh = run(
        triton_plan.query_tiles(T, per_tile, query_start_Q, context_len_R), choice.tiles, per_tile, None
    )
    return run(triton_plan.decode_tiles(query_start_Q, context_len_R), choice.decode, 1, out_THh)


def facts(q_THh: jax.Array, k_NKSh: jax.Array, block_table_RM: jax.Array, window: int | None) -> Facts:
    """What the choice for a call depends on."""
    T, H, h = q_THh.shape
    _, K, S, _ = k_NKSh.shape
    R, M = block_table_RM.shape
    return Facts(T, R, M * S, K, H // K, h, q_THh.dtype.name, k_NKSh.dtype.name, window)


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
    kv_dtype = k_NKSh.dtype
    if kv_dtype not in POOL_DTYPES or v_NKSh.dtype != kv_dtype:
        names = ", ".join(jnp.dtype(d).name for d in POOL_DTYPES)
        return False, f"KV cache dtypes {kv_dtype}, {v_NKSh.dtype}; supported: one of {names} for both"
    if q_THh.dtype not in QUERY_DTYPES:
        return (
            False,
            f"queries of {q_THh.dtype}; supported: {', '.join(jnp.dtype(d).name for d in QUERY_DTYPES)}",
        )
    if kv_dtype == jnp.float8_e4m3fn and generation == "ampere":
        return False, "GPUs of the ampere generation cannot convert float8_e4m3fn; int8 and float8_e5m2 work"
    (_, H, h), K = q_THh.shape, k_NKSh.shape[1]
    if H % K:
        return False, f"{H} query heads are not a multiple of {K} KV heads"
    if h > MAX_HEAD_WIDTH:
        return False, f"head width {h}; supported: up to {MAX_HEAD_WIDTH}"
    return offsets_fit(k_NKSh.shape, kv_dtype)


def supports_share(*args: jax.Array, share: Share, **options: Any) -> tuple[bool, str]:
    """Whether ``ragged_paged_attention_share`` can serve the arguments, and why not."""
    return supports(*args, **options)
