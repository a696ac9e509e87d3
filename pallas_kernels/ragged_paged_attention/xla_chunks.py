"""What the loops of the XLA attention share: reading a chunk of the context, and the online softmax over chunks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.ragged_paged_attention.shares import Share

# Slots per chunk. The same for every batch shape, so that a row's sums are formed in the same order everywhere.
CHUNK_SLOTS = 128
# Smaller than any score. It is finite, so that a query which has seen nothing yet needs no special case.
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class Scoring:
    """How a product of query and key becomes a logit."""

    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True)
class Context:
    """The cached keys and values of a batch, or the share of them that a device holds.

    Slots are counted along a row of the table, as far as they are here.

    Attributes:
        read: blocks ``[B, J]`` of B sequences as float32 keys ``[B, K, J * S, h]`` and values of width ``value_width``;
            the other two arguments are those of ``read_chunk``.
        slots: S of a block.
        block_table_RM: int32 block ids.
        share: of the context, see ``Share``. Outputs then have one more value behind those of a head: the log-sum-exp.
    """

    read: Callable[[jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]
    slots: int
    value_width: int
    block_table_RM: jax.Array
    share: Share | None = None

    def positions(self, slot: jax.Array) -> jax.Array:
        """Positions in the sequence of slots."""
        return slot if self.share is None else self.share.positions(slot, self.slots)

    def slots_before(self, position: jax.Array) -> jax.Array:
        """How many slots have positions below this one; may be negative where it is."""
        return position if self.share is None else self.share.slots_before(position, self.slots)


def blocks_per_chunk(slots: int, width: int) -> int:
    """Blocks of ``slots`` slots that one chunk spans, for a table of ``width`` blocks."""
    return min(width, max(1, CHUNK_SLOTS // slots))


def read_chunk(
    pool_NKSh: jax.Array, block_BJ: jax.Array, owned_B: jax.Array, visible_B: jax.Array | None
) -> jax.Array:
    """Reads J blocks of each of B sequences as float32 ``[B, K, J * S, h]``.

    Slots from ``owned_B`` on are 0, and so are those before ``visible_B`` (None: without a window): a block that left
    the window belongs to somebody else by now, and a probability of 0 would not stop its NaN.

    The pool itself is never converted: the CPU backend would gather bfloat16 from a float32 copy of the pool, so the
    bits are gathered; the barrier keeps that reinterpretation, which makes a copy when alone, inside the loop.
    """
    N, K, S, h = pool_NKSh.shape
    pool_NKSh, block_BJ = jax.lax.optimization_barrier((pool_NKSh, block_BJ))
    B, J = block_BJ.shape
    head_BKJ = block_BJ[:, None, :] * K + jnp.arange(K)[:, None]
    bits_NC = _as_bits(pool_NKSh).reshape(N * K, S * h)
    x_BKJC = _from_bits(
        jnp.take(bits_NC, head_BKJ.reshape(-1), axis=0, mode="clip"), value_dtype(pool_NKSh.dtype)
    )
    # The mask runs over the flat S * h axis: a loop of h = 64 elements would be unrolled instead of vectorized.
    owned_BJ = (owned_B[:, None] - jnp.arange(J) * S) * h
    mask_BJC = jnp.arange(S * h) < owned_BJ[:, :, None]
    if visible_B is not None:
        visible_BJ = (visible_B[:, None] - jnp.arange(J) * S) * h
        mask_BJC &= jnp.arange(S * h) >= visible_BJ[:, :, None]
    return jnp.where(mask_BJC[:, None], x_BKJC.reshape(B, K, J, S * h), 0.0).reshape(B, K, J * S, h)


def _as_bits(pool: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16}
    if jnp.issubdtype(pool.dtype, jnp.floating) and pool.dtype.itemsize in unsigned:
        return jax.lax.bitcast_convert_type(pool, unsigned[pool.dtype.itemsize])
    return pool


def _from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Exact conversion to float32. XLA converts fp8 by slow scalar code: here it passes through float16."""
    if dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    if dtype == jnp.float16:
        return _float16(x)
    if dtype == jnp.float8_e5m2:
        return _float16(x.astype(jnp.uint16) << 8)
    if dtype == jnp.float8_e4m3fn:
        # The exponent of float16 has a bias of 15 instead of 7: a factor of 2 ** 8, subnormals included.
        wide = x.astype(jnp.uint16)
        value = _float16(((wide & 0x80) << 8) | ((wide & 0x7F) << 7)) * 256.0
        return jnp.where((x & 0x7F) == 0x7F, jnp.nan, value)
    return x.astype(jnp.float32)


def _float16(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def causal(slot_BC: jax.Array, position_Bt: jax.Array, window: int | None) -> jax.Array:
    """Which keys, given their positions, a query at a position sees: ``[B, t, C]``."""
    seen_BtC = slot_BC[:, None] <= position_Bt[:, :, None]
    if window is not None:
        seen_BtC &= slot_BC[:, None] > position_Bt[:, :, None] - window
    return seen_BtC


@dataclass(frozen=True)
class Softmax:
    """The state of an online softmax: running maximum, sum of exponentials, weighted sum of values."""

    top_BKGt: jax.Array
    sum_BKGt: jax.Array
    out_BKGth: jax.Array


jax.tree_util.register_dataclass(Softmax)


def start(shape_BKGth: tuple[int, ...], sink_KG: jax.Array | None) -> Softmax:
    """The state before the first chunk; a sink is a logit with value 0."""
    shape_BKGt = shape_BKGth[:-1]
    out_BKGth = jnp.zeros(shape_BKGth, jnp.float32)
    if sink_KG is None:
        return Softmax(jnp.full(shape_BKGt, LOWEST), jnp.zeros(shape_BKGt), out_BKGth)
    return Softmax(jnp.broadcast_to(sink_KG[:, :, None], shape_BKGt), jnp.ones(shape_BKGt), out_BKGth)


def step(
    state: Softmax,
    q_BKGth: jax.Array,
    k_BKCh: jax.Array,
    v_BKCh: jax.Array,
    seen_BtC: jax.Array,
    scoring: Scoring,
) -> Softmax:
    """Adds a chunk, of whose slots the queries see ``seen_BtC``; queries are scaled already. Values may have another
    width than keys."""
    B, K, G, t, h = q_BKGth.shape
    C = k_BKCh.shape[2]
    q_BKPh = q_BKGth.reshape(B, K, G * t, h)
    if t == 1:
        # Keys first: the CPU backend packs the second operand on every call, and there are few queries. The barrier
        # keeps the compiler from swapping the operands back.
        s_BKPC = jax.lax.optimization_barrier(jnp.einsum("bkch,bkph->bkcp", k_BKCh, q_BKPh)).swapaxes(2, 3)
    else:
        s_BKPC = jnp.einsum("bkph,bkch->bkpc", q_BKPh, k_BKCh)
    if scoring.soft_cap is not None:
        s_BKPC = scoring.soft_cap * jnp.tanh(s_BKPC / scoring.soft_cap)
    s_BKGtC = jnp.where(seen_BtC[:, None, None], s_BKPC.reshape(B, K, G, t, C), -jnp.inf)
    top_BKGt = jnp.maximum(state.top_BKGt, jnp.max(s_BKGtC, axis=-1))
    p_BKGtC = jnp.exp(s_BKGtC - top_BKGt[..., None])
    keep_BKGt = jnp.exp(state.top_BKGt - top_BKGt)
    o_BKPh = jnp.einsum("bkpc,bkch->bkph", p_BKGtC.reshape(B, K, G * t, C), v_BKCh)
    out_BKGth = state.out_BKGth * keep_BKGt[..., None] + o_BKPh.reshape(B, K, G, t, -1)
    return Softmax(top_BKGt, state.sum_BKGt * keep_BKGt + jnp.sum(p_BKGtC, axis=-1), out_BKGth)


def finish(state: Softmax, with_logsumexp: bool = False) -> jax.Array:
    """The attention output; 0 for queries that saw nothing.

    Args:
        with_logsumexp: append the logarithm of the sum of exponentials as one more value; -inf for such queries.
    """
    empty_BKGt = state.sum_BKGt == 0
    sum_BKGt = jnp.where(empty_BKGt, 1.0, state.sum_BKGt)
    out_BKGth = state.out_BKGth / sum_BKGt[..., None]
    if not with_logsumexp:
        return out_BKGth
    lse_BKGt = jnp.where(empty_BKGt, -jnp.inf, state.top_BKGt + jnp.log(sum_BKGt))
    return jnp.concatenate([out_BKGth, lse_BKGt[..., None]], axis=-1)
