"""Head norms, rotary embedding and write of K and V in one op: the semantics, in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.reference import kv_write


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the output of the q/k/v projection, normalises and rotates q and k, and caches K and V.

    Rotation (Su et al., 2021) is done in float32 and rounded to the dtype of the activations before K is converted
    to that of the cache, as by the separate ops.

    Args:
        qkv_TAh: A = H + 2 K heads of a token: queries, keys, values.
        cos_Ti, sin_Ti: float32, i = rotated width / 2; feature j is paired with feature j + i, and the features from
            2 i on stay as they are.
        k_NKSh, v_NKSh, slot_T, k_scale_K, v_scale_K: as in ``kv_write``.
        q_norm_h, k_norm_h: float32 factors of a root-mean-square norm of each head before the rotation; None for none.
        norm_eps: added to the mean square.

    Returns:
        The rotated queries ``[T, H, h]`` in the dtype of ``qkv``, and the updated pools.
    """
    K = k_NKSh.shape[1]
    H = qkv_TAh.shape[1] - 2 * K
    q_THh, k_TKh, v_TKh = jnp.split(qkv_TAh, (H, H + K), axis=1)
    q_THh = rotate(norm(q_THh, q_norm_h, norm_eps), cos_Ti, sin_Ti)
    k_TKh = rotate(norm(k_TKh, k_norm_h, norm_eps), cos_Ti, sin_Ti)
    pools = kv_write(k_NKSh, v_NKSh, k_TKh, v_TKh, slot_T, k_scale_K=k_scale_K, v_scale_K=v_scale_K)
    return q_THh, *pools


def norm(x_THh: jax.Array, factor_h: jax.Array | None, eps: float) -> jax.Array:
    """Root mean square norm (Zhang and Sennrich, 2019) of each head, in float32."""
    if factor_h is None:
        return x_THh
    x32 = x_THh.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * factor_h).astype(x_THh.dtype)


def rotate(x_THh: jax.Array, cos_Ti: jax.Array, sin_Ti: jax.Array) -> jax.Array:
    """Rotates the leading 2 i features of each head."""
    i = cos_Ti.shape[-1]
    x32 = x_THh.astype(jnp.float32)
    first, second, rest = x32[..., :i], x32[..., i : 2 * i], x32[..., 2 * i :]
    cos, sin = cos_Ti[:, None, :], sin_Ti[:, None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x_THh.dtype)
