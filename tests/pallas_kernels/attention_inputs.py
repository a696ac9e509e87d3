"""Batches for the tests of ragged paged attention: shapes, block tables, pools with foreign values, trees."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.kv_storage import as_stored, value_dtype

S = 4
Rows = tuple[tuple[int, int], ...]
KV_DTYPES = (
    jnp.float32,
    jnp.float16,
    jnp.bfloat16,
    jnp.int8,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.uint16,
    jnp.uint8,
)


@dataclass(frozen=True)
class Shape:
    """Everything a compiled op depends on: R rows, T tokens, table width M, N blocks, and the static options."""

    R: int
    T: int
    M: int = 12
    N: int = 60
    K: int = 2
    G: int = 3
    h: int = 8
    kv_dtype: jnp.dtype = jnp.float32
    q_dtype: jnp.dtype = jnp.float32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    tree_words: int = 0


SHAPES = (
    Shape(R=6, T=64, tree_words=2),
    Shape(R=4, T=32, G=7, K=1, kv_dtype=jnp.int8, sinks=True, window=1),
    Shape(R=3, T=48, G=8, K=1, kv_dtype=jnp.float8_e4m3fn, window=1000),
    Shape(R=6, T=64, kv_dtype=jnp.uint16),
    Shape(R=6, T=6, kv_dtype=jnp.uint8),
    Shape(R=3, T=48, kv_dtype=jnp.float8_e5m2, soft_cap=2.0, sinks=True, window=S),
    Shape(R=6, T=64, tree_words=1, window=S + 30, kv_dtype=jnp.float16, soft_cap=2.0),
    Shape(R=3, T=12, K=1, G=16, h=96),
    Shape(R=1, T=1, K=1, G=1, h=80, kv_dtype=jnp.bfloat16),
)
"""Compiled by every run: each dtype, and each option together with others."""
MORE_SHAPES = (
    Shape(R=6, T=64),
    Shape(R=6, T=6, G=1, window=S + 1, kv_dtype=jnp.float16),
    Shape(R=6, T=64, G=4, K=1, kv_dtype=jnp.bfloat16, soft_cap=2.0),
    Shape(R=1, T=1, K=1, h=16),
    Shape(R=3, T=3, G=1, h=80, kv_dtype=jnp.bfloat16),
)
"""For the slow tests, with whatever else is drawn there."""


@st.composite
def any_shape(draw: st.DrawFn, dtypes: tuple[jnp.dtype, ...]) -> Shape:
    R, M = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    kv_dtype = draw(st.sampled_from(dtypes))
    return Shape(
        R=R,
        T=draw(st.integers(1, 70)),
        M=M,
        N=4 * M + 1 + draw(st.integers(0, 9)),
        K=draw(st.integers(1, 3)),
        G=draw(st.sampled_from([1, 2, 4, 5, 7, 8, 16])),
        h=draw(st.sampled_from([8, 16, 40, 64, 80, 96, 128])),
        kv_dtype=kv_dtype,
        window=draw(st.none() | st.integers(1, 4 * M + 5)),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.booleans()),
        tree_words=draw(st.sampled_from([0, 0, 1, 2])),
    )


def inputs(
    shape: Shape, rows: Rows, canary: float = np.nan, seed: int = 0
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Arguments of the op for ``rows`` of (tokens of this step, context length), and its array options.

    What no sequence owns holds ``canary``; table entries past the context are garbage.
    """
    rng = np.random.default_rng(seed)
    blocks = [-(-context // S) for _, context in rows]
    ids = rng.permutation(np.arange(1, shape.N))
    assert sum(blocks) <= len(ids)
    assert sum(n for n, _ in rows) <= shape.T
    garbage = [0, -1, 7, shape.N, 2**31 - 1, -(2**31)]
    table_RM = rng.choice(garbage, size=(shape.R, shape.M))
    owned_NS = np.zeros((shape.N, S), bool)
    for row, (_, context) in enumerate(rows):
        table_RM[row, : blocks[row]], ids = ids[: blocks[row]], ids[blocks[row] :]
        for i in range(context):
            owned_NS[table_RM[row, i // S], i % S] = True
    padding = [(0, 0)] * (shape.R - len(rows))
    length_R, context_R = np.array([*rows, *padding]).reshape(-1, 2).T
    start_Q = np.concatenate([[0], np.cumsum(length_R)])
    integers = [jnp.asarray(x.astype(np.int32)) for x in (table_RM, start_Q, context_R)]
    H = shape.K * shape.G
    q_THh = jnp.asarray(rng.normal(size=(shape.T, H, shape.h)), shape.q_dtype)
    pools = [_pool(shape, owned_NS, canary, rng) for _ in range(2)]
    options = {}
    if shape.sinks:
        options["sinks_H"] = jnp.asarray(rng.normal(size=H), jnp.float32)
    if jnp.dtype(shape.kv_dtype).itemsize == 1:
        options["k_scale_K"] = jnp.asarray(rng.uniform(0.01, 0.05, shape.K), jnp.float32)
        options["v_scale_K"] = jnp.asarray(rng.uniform(0.5, 2.0, shape.K), jnp.float32)
    if shape.tree_words:
        options["ancestors_TU"] = jnp.asarray(tree_masks(shape, rows, rng))
    return (q_THh, *pools, *integers), options


def tree_masks(shape: Shape, rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Random trees, parents first, for every other row that fits into the masks; the other rows are causal."""
    masks_TU = np.zeros((shape.T, shape.tree_words), np.uint32)
    start = 0
    for index, (tokens, _) in enumerate(rows):
        if index % 2 == 0 and tokens <= 32 * shape.tree_words:
            for node in range(tokens):
                if node:
                    masks_TU[start + node] = masks_TU[start + rng.integers(node)]
                masks_TU[start + node, node // 32] |= np.uint32(1 << node % 32)
        start += tokens
    return masks_TU.view(np.int32)


def _pool(shape: Shape, owned_NS: np.ndarray, canary: float, rng: np.random.Generator) -> jax.Array:
    integer = shape.kv_dtype == jnp.int8
    x = rng.normal(size=(shape.N, shape.K, S, shape.h)) * (40 if integer else 1)
    x = np.where(owned_NS[:, None, :, None], x, 127 if integer else canary)
    values = jnp.asarray(x.astype(np.float32)).astype(value_dtype(shape.kv_dtype))
    return as_stored(values, shape.kv_dtype)


@st.composite
def batches(draw: st.DrawFn, shape: Shape) -> Rows:
    """Mixed batches with the lengths at which paged attention breaks: around blocks, and full tables."""
    full = shape.M * S
    rows: list[tuple[int, int]] = []
    room = shape.T
    for _ in range(draw(st.integers(0, min(shape.R, 4)))):
        context = draw(st.sampled_from([1, S - 1, S, S + 1, 2 * S, full - 1, full]) | st.integers(1, full))
        context = min(max(context, 1), full)
        tokens = min(draw(st.sampled_from([0, 1, 1, 2, context])), context, room)
        room -= tokens
        rows.append((tokens, context))
    return tuple(rows)


def solo(args: tuple[jax.Array, ...], row: int) -> tuple[jax.Array, ...]:
    """The arguments for one row of a batch alone: first in a batch of the same shape, so that nothing compiles."""
    q, k, v, table, start_Q, context_R = args
    tokens, R = int(start_Q[row + 1] - start_Q[row]), table.shape[0]
    start = jnp.asarray([0] + [tokens] * R, jnp.int32)
    context = jnp.zeros_like(context_R).at[0].set(context_R[row])
    return jnp.roll(q, -int(start_Q[row]), axis=0), k, v, jnp.roll(table, -row, axis=0), start, context
