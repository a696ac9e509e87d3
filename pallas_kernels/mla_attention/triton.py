"""Multi-head latent attention in Pallas-Triton: tiles of heads over a share of the context each.

All heads read the same latents, which serve as keys and as values: a program loads a chunk once and uses it in both
products. With 16 heads the kernel is bound by bandwidth, with 128 heads as much by arithmetic (about 240 operations
per byte). Shares of the context are merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_write.triton_convert import check_pool, check_values
from pallas_kernels.mla_attention.tokens import tokens_of
from pallas_kernels.mla_attention.triton_kernel import Inputs, Spec, attend, attend_share, merge
from pallas_kernels.mla_attention.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call


def supports(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    latent_NKSr: jax.Array,
    rope_NKSd: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    latent_scale_K: jax.Array | None = None,
    rope_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if latent_NKSr.shape[1] != 1 or latent_NKSr.shape[:3] != rope_NKSd.shape[:3]:
        return (
            False,
            f"pools of shapes {latent_NKSr.shape} and {rope_NKSd.shape}; needed: [N, 1, S, r] and [N, 1, S, d]",
        )
    if latent_NKSr.dtype != rope_NKSd.dtype:
        return False, f"pools of dtypes {latent_NKSr.dtype} and {rope_NKSd.dtype}; they must be the same"
    if q_latent_THr.dtype != q_rope_THd.dtype:
        return False, f"queries of dtypes {q_latent_THr.dtype} and {q_rope_THd.dtype}; they must be the same"
    if latent_NKSr.shape[3] > 512:
        return (
            False,
            f"latent width {latent_NKSr.shape[3]}; the output of a tile of heads fits registers up to 512",
        )
    for ok, reason in (
        check_pool(latent_NKSr, generation),
        check_pool(rope_NKSd, generation),
        check_values(q_latent_THr),
    ):
        if not ok:
            return False, reason
    return True, ""


def mla_attention(
    q_latent_THr: jax.Array,
    q_rope_THd: jax.Array,
    latent_NKSr: jax.Array,
    rope_NKSd: jax.Array,
    block_table_RM: jax.Array,
    query_start_Q: jax.Array,
    context_len_R: jax.Array,
    *,
    scale: float,
    latent_scale_K: jax.Array | None = None,
    rope_scale_K: jax.Array | None = None,
    ancestors_TU: jax.Array | None = None,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See ``reference.mla_attention``.

    Every token reads its context by itself; a row with several tokens shares it in the L2 cache. That is right for
    decodes and drafts to verify; a long prefill chunk computes with full keys and values in less operations.
    """
    T, H, r = q_latent_THr.shape
    if choice is None:
        names = jnp.dtype(q_latent_THr.dtype).name, jnp.dtype(latent_NKSr.dtype).name
        choice = choose(generation, H, r, *names, T)
    tokens = tokens_of(T, query_start_Q, context_len_R, ancestors_TU)
    inputs = Inputs(
        q_latent_THr,
        q_rope_THd,
        latent_NKSr,
        rope_NKSd,
        block_table_RM,
        tokens,
        latent_scale_K,
        rope_scale_K,
        ancestors_TU,
    )
    spec = Spec(choice=choice, scale=scale)
    # Tiles of the heads of a token are neighbours in the grid, and share its latents in the L2 cache.
    call = partial(
        triton_call,
        grid=(pl.cdiv(H, choice.heads), T, choice.splits),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        interpret=interpret,
    )
    out_THr = jax.ShapeDtypeStruct((T, H, r), q_latent_THr.dtype)
    if choice.splits == 1:
        return call(partial(attend, spec=spec), out_shape=out_THr, name="mla_attention")(inputs)
    shares = [jax.ShapeDtypeStruct((choice.splits, T, H, *last), jnp.float32) for last in ((r,), (), ())]
    parts = call(partial(attend_share, spec=spec), out_shape=shares, name="mla_attention")(inputs)
    join = triton_call(
        partial(merge, splits=choice.splits),
        grid=(T * H,),
        out_shape=out_THr,
        name="mla_attention_merge",
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )
    return join(*parts)
