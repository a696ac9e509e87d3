"""Write of new K and V into the paged pool in Pallas-Triton: one launch for both pools, in place.

XLA makes one scatter per pool, which stores 16-bit and 8-bit values by compare-and-swap loops on the 32-bit words
around them (seen in code for H200 with jax 0.11.2). Here each program takes some pairs of token and head, converts
their K and V and stores vectors in their slots; the pools are aliased, so that nothing else of them is touched. Where
K is rotated, ``rope_kv_write`` saves the launches that make this op's operands.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_write.triton_convert import check_pool, check_values, convert
from pallas_kernels.kv_write.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call


def supports(
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if k_NKSh.shape[:3] != v_NKSh.shape[:3]:
        return (
            False,
            f"pools of shapes {k_NKSh.shape} and {v_NKSh.shape}; they may differ in the width of a head only",
        )
    for pool, x in ((k_NKSh, k_TKh), (v_NKSh, v_TKh)):
        for ok, reason in (check_pool(pool, generation), check_values(x)):
            if not ok:
                return False, reason
    return True, ""


def kv_write(
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    k_TKh: jax.Array,
    v_TKh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``reference.kv_write``. The pools are updated in place if the caller donates them.

    The widths of K and V may differ: the latent and the rope key of multi-head latent attention are written by one
    call with K = 1.
    """
    T, K, _ = k_TKh.shape
    widest = max(k_TKh.shape[2], v_TKh.shape[2])
    if choice is None:
        choice = choose(generation, K, widest, jnp.dtype(k_NKSh.dtype).name, T)
    shapes = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_NKSh, v_NKSh)]
    run = triton_call(
        functools.partial(_kernel, rows=choice.rows),
        grid=(pl.cdiv(T * K, choice.rows),),
        out_shape=shapes,
        name="kv_write",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 0, 1: 1},
    )
    out = run(k_NKSh, v_NKSh, k_TKh, v_TKh, slot_T, k_scale_K, v_scale_K)
    return out[0], out[1]


def _kernel(k_in, v_in, k_TKh, v_TKh, slot_T, k_scale_K, v_scale_K, k_NKSh, v_NKSh, *, rows: int) -> None:  # type: ignore[no-untyped-def]
    """Rows ``[i * rows, (i + 1) * rows)`` of the flat pairs of token and head. The aliased inputs are not read."""
    T, K, _ = k_TKh.shape
    S = k_NKSh.shape[2]
    row_B = pl.program_id(0) * rows + jnp.arange(rows)
    real_B = row_B < T * K
    token_B, head_B = row_B // K, row_B % K
    slot_B = plgpu.load(slot_T.at[token_B], mask=real_B, other=0)
    block_B, offset_B = slot_B // S, slot_B % S
    for x_TKh, scale_K, pool_NKSh in ((k_TKh, k_scale_K, k_NKSh), (v_TKh, v_scale_K, v_NKSh)):
        width = x_TKh.shape[2]
        lane_h = jnp.arange(1 << math.ceil(math.log2(width)))
        mask_Bh = real_B[:, None] & (lane_h < width)[None, :]
        x_Bh = plgpu.load(x_TKh.at[token_B[:, None], head_B[:, None], lane_h[None, :]], mask=mask_Bh, other=0)
        scale_B = plgpu.load(scale_K.at[head_B], mask=real_B, other=1)
        at = pool_NKSh.at[block_B[:, None], head_B[:, None], offset_B[:, None], lane_h[None, :]]
        plgpu.store(at, convert(x_Bh, scale_B[:, None], pool_NKSh.dtype), mask=mask_Bh)
