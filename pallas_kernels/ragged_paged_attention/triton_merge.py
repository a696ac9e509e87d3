"""Merges the softmax states that the splits of a context left behind."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.triton_chunk import LOWEST, Ref, div, log_sum_exp
from pallas_kernels.ragged_paged_attention.triton_kernel import Partial
from pallas_kernels.ragged_paged_attention.triton_plan import Tiles
from pallas_kernels.triton_call import triton_call


def merge(
    state: Partial,
    tiles: Tiles,
    tokens: int,
    shape: jax.ShapeDtypeStruct,
    out_THh: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """The attention output of the tokens of the tiles, written into (a copy in place of) ``out_THh``.

    Method: the log-sum-exp merge of Flash-Decoding (Dao et al. 2023). Shares are added in the order of the context.
    """
    P, H, _, _ = state.out_PHXh.shape
    call = partial(
        triton_call,
        grid=(P, H),
        out_shape=shape,
        name="ragged_paged_attention_merge",
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
    kernel = partial(_merge, tokens=tokens)
    if out_THh is None:
        return call(kernel)(state, tiles)
    aliases = {len(jax.tree.leaves((state, tiles))): 0}
    return call(partial(_merge_in_place, tokens=tokens), input_output_aliases=aliases)(state, tiles, out_THh)


def _merge_in_place(state: Partial, tiles: Tiles, before_THh: Ref, out_THh: Ref, *, tokens: int) -> None:
    del before_THh
    _merge(state, tiles, out_THh, tokens=tokens)


def _merge(state: Partial, tiles: Tiles, out_THh: Ref, *, tokens: int) -> None:
    place, head = pl.program_id(0), pl.program_id(1)
    _, _, splits, h = state.out_PHXh.shape
    tile = div(place, tokens)
    i = place - tile * tokens

    @pl.when(i < tiles.count_I[tile])
    def compute() -> None:
        split, width = jnp.arange(splits), jnp.arange(pl.next_power_of_2(h))
        sum_X = plgpu.load(state.sum_PHX.at[place, head, split])
        top_X = plgpu.load(state.top_PHX.at[place, head, split])
        filled_X = sum_X != 0
        top = jnp.max(jnp.where(filled_X, top_X, LOWEST))
        weight_X = jnp.where(filled_X, jnp.exp2(top_X - top), 0.0)
        out_Xh = plgpu.load(
            state.out_PHXh.at[place, head, split[:, None], width[None, :]],
            mask=filled_X[:, None] & (width < h)[None, :],
            other=0,
        )
        total = jnp.sum(sum_X * weight_X)
        out_h = jnp.sum(out_Xh * weight_X[:, None], axis=0) / jnp.where(total == 0, 1.0, total)
        token = tiles.token_I[tile] + i
        plgpu.store(out_THh.at[token, head, width], out_h.astype(out_THh.dtype), mask=width < h)
        if out_THh.shape[-1] > h:
            plgpu.store(out_THh.at[token, head, h], log_sum_exp(top, total))
