"""Head norms, rotary embedding and write of K and V in Pallas-Triton: one launch, pools in place.

Whether it pays. Launches of a layer between the q/k/v projection and the attention, in a decode step of 64 rows
compiled for H200 with jax 0.11.2, and how K and V reach a 16-bit or 8-bit pool:

==========================================  ===========  ==========  =======================================
variant                                     Llama-3-8B   Qwen3-0.6B  stores
==========================================  ===========  ==========  =======================================
all in XLA                                  3            7           a 32-bit compare-and-swap loop per value
norms and rope in XLA, ``kv_write`` in      4            6           vectors
Triton
this op                                     1            1           vectors
==========================================  ===========  ==========  =======================================

XLA fuses the rotation of K into its scatter, but a custom call needs its operands in memory: the separate Triton write
makes XLA materialise the rotated K and a slice of V. This op reads the output of the projection as it is. (If XLA
splits the projection along its contraction, the sum of the parts becomes a launch of its own in front of a custom
call; XLA's own readers each repeat it.) The data of such a step, 1.6 MB for Llama-3-8B, takes 0.3 us at 4.8 TB/s, less
than any launch: time is launches. At 2 us each, an estimate and not a measurement, and with that sum as a launch of
its own, 32 layers of Llama-3-8B save 0.06 ms of a step of 3.5 ms, and 28 layers of Qwen3-0.6B, which has norms of
heads, 0.3 ms of a step whose weights take 0.25 ms to read. In prefill the bytes count: every value is read and written
once instead of twice, and without atomics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gpus import Generation
from pallas_kernels.kv_write.triton_convert import check_pool, check_values
from pallas_kernels.rope_kv_write.triton_kernel import Config, rotate_and_write
from pallas_kernels.rope_kv_write.tuning import Choice, choose
from pallas_kernels.triton_call import triton_call


def supports(
    qkv_TAh: jax.Array,
    cos_Ti: jax.Array,
    sin_Ti: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    q_norm_h: jax.Array | None = None,
    k_norm_h: jax.Array | None = None,
    norm_eps: float = 1e-6,
    generation: Generation = "hopper",
) -> tuple[bool, str]:
    """Whether this backend can serve the arguments, and why not."""
    if k_NKSh.shape != v_NKSh.shape:
        return False, f"pools of different shapes: {k_NKSh.shape} and {v_NKSh.shape}"
    if 2 * cos_Ti.shape[1] > k_NKSh.shape[3]:
        return False, f"{cos_Ti.shape[1]} rotated pairs of features in heads of {k_NKSh.shape[3]}"
    for ok, reason in (
        check_pool(k_NKSh, generation),
        check_pool(v_NKSh, generation),
        check_values(qkv_TAh),
    ):
        if not ok:
            return False, reason
    return True, ""


def rope_kv_write(
    qkv_TAh: jax.Array,
    cos_Ti: jax.Array,
    sin_Ti: jax.Array,
    k_NKSh: jax.Array,
    v_NKSh: jax.Array,
    slot_T: jax.Array,
    *,
    k_scale_K: jax.Array,
    v_scale_K: jax.Array,
    q_norm_h: jax.Array | None = None,
    k_norm_h: jax.Array | None = None,
    norm_eps: float = 1e-6,
    generation: Generation = "hopper",
    choice: Choice | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``reference.rope_kv_write``. The pools are updated in place if the caller donates them.

    Without norms the results are those of the separate steps up to the compilers' choice of fused multiply-adds in the
    rotation; a norm's sum is formed in another order.
    """
    T, A, h = qkv_TAh.shape
    K = k_NKSh.shape[1]
    H = A - 2 * K
    if choice is None:
        choice = choose(generation, A, h, jnp.dtype(k_NKSh.dtype).name, T)
    norms: tuple[Any, ...] = tuple(x for x in (q_norm_h, k_norm_h) if x is not None)
    config = Config(
        rows=choice.rows, H=H, q_norm=q_norm_h is not None, k_norm=k_norm_h is not None, norm_eps=norm_eps
    )
    run = triton_call(
        functools.partial(rotate_and_write, config=config),
        grid=(pl.cdiv(T * H, choice.rows) + 2 * pl.cdiv(T * K, choice.rows),),
        out_shape=[
            jax.ShapeDtypeStruct((T, H, h), qkv_TAh.dtype),
            jax.ShapeDtypeStruct(k_NKSh.shape, k_NKSh.dtype),
            jax.ShapeDtypeStruct(v_NKSh.shape, v_NKSh.dtype),
        ],
        name="rope_kv_write",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=interpret,
        input_output_aliases={0: 1, 1: 2},
    )
    out = run(k_NKSh, v_NKSh, qkv_TAh, cos_Ti, sin_Ti, slot_T, k_scale_K, v_scale_K, *norms)
    return out[0], out[1], out[2]
