"""The contract of the fused rope and KV write: every backend's test class inherits ``RopeKVWriteContract``."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.kv_storage import value_dtype
from pallas_kernels.rope_kv_write.reference import rope_kv_write as reference
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.kv_write_cases import POOL_DTYPES
from tests.pallas_kernels.picking import Picks, picked_shapes

N, S = 9, 4


@dataclass(frozen=True)
class Shape:
    """What a compiled op depends on: T tokens, H query and K cache heads of h values, i rotated pairs."""

    T: int
    H: int
    K: int
    h: int
    i: int
    kv_dtype: jnp.dtype
    dtype: jnp.dtype = jnp.bfloat16
    norms: bool = False


SHAPES = (
    Shape(T=13, H=7, K=1, h=80, i=16, kv_dtype=jnp.bfloat16),
    Shape(T=7, H=6, K=2, h=24, i=12, kv_dtype=jnp.int8, norms=True),
    Shape(T=7, H=8, K=1, h=32, i=4, kv_dtype=jnp.float8_e4m3fn, dtype=jnp.float16, norms=True),
)
PARTIAL, NORMS = SHAPES[0], SHAPES[1]
BIT_SHAPES = (
    replace(PARTIAL, kv_dtype=jnp.uint16),
    NORMS,
    replace(SHAPES[2], kv_dtype=jnp.uint8, norms=False),
)
"""For backends that also take pools of the bits of such values."""


def inputs(shape: Shape, slots: list[int], seed: int) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Arguments of the op; tokens without a slot are padding."""
    rng = np.random.default_rng(seed)
    itemsize = jnp.dtype(shape.kv_dtype).itemsize
    bits = rng.integers(0, 100, size=(2, N, shape.K, S, shape.h, itemsize), dtype=np.uint8)
    pools = [jnp.asarray(b.view(jnp.dtype(shape.kv_dtype))[..., 0]) for b in bits]
    qkv_TAh = jnp.asarray(3 * rng.normal(size=(shape.T, shape.H + 2 * shape.K, shape.h)), shape.dtype)
    angle_Ti = rng.uniform(0, 6.3, size=(shape.T, shape.i))
    tables = [jnp.asarray(f(angle_Ti), jnp.float32) for f in (np.cos, np.sin)]
    slot_T = jnp.asarray(slots + [0] * (shape.T - len(slots)), jnp.int32)
    options = {name: rng.uniform(0.01, 1, shape.K) for name in ("k_scale_K", "v_scale_K")}
    if shape.norms:
        options |= {name: rng.uniform(0.5, 2, shape.h) for name in ("q_norm_h", "k_norm_h")}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in options.items()}
    return (qkv_TAh, *tables, *pools, slot_T), arrays


@st.composite
def any_shape(draw: st.DrawFn, dtypes: tuple[jnp.dtype, ...]) -> Shape:
    h = draw(st.integers(2, 100))
    return Shape(
        T=draw(st.integers(1, 30)),
        H=draw(st.integers(1, 20)),
        K=draw(st.integers(1, 4)),
        h=h,
        i=draw(st.integers(1, h // 2)),
        kv_dtype=draw(st.sampled_from(dtypes)),
        dtype=draw(st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32])),
        norms=draw(st.booleans()),
    )


class RopeKVWriteContract:
    """Tests of one backend; ``op`` is what is tested."""

    op: staticmethod
    compiled = staticmethod(jitted)
    """Of the op and of the oracle alike, since their bits are compared."""
    typed_pools_only = False
    """Whether the backend refuses pools that hold the bits of their values (see ``kv_storage``)."""

    @picked_shapes
    def test_parity(self, picks: Picks) -> None:
        """Queries, and every block but 0, have the bits of the reference. A norm's sum may be formed in another order,
        which can move its results to neighbouring values, and what is rotated from them by the steps of the largest."""
        few = SHAPES if self.typed_pools_only else BIT_SHAPES
        every = any_shape(tuple(dtype for dtype in POOL_DTYPES if self._serves(dtype)))

        @picks.settings(few)
        @given(shape=picks.shapes(few, every), data=st.data(), seed=st.integers(0, 99))
        def check(shape: Shape, data: st.DataObject, seed: int) -> None:
            slots = data.draw(st.lists(st.integers(S, N * S - 1), max_size=shape.T, unique=True))
            args, options = inputs(shape, slots, seed)
            want_q, *want_pools = self.compiled(reference)(*args, **options)
            got_q, *got_pools = self.compiled(self.op)(*args, **options)
            pairs = [(got_q, want_q), *((a[1:], b[1:]) for a, b in zip(got_pools, want_pools))]
            for a, b in pairs:
                assert a.dtype == b.dtype
                if shape.norms:
                    assert _steps_apart(a, b) <= 1 or _largest_steps_apart(a, b) <= 2
                else:
                    np.testing.assert_array_equal(_bytes(a), _bytes(b))

        check()

    def test_untouched_slots_keep_their_bits(self) -> None:
        shape = NORMS
        args, options = inputs(shape, [5, 6, 30, 31, 35], 1)
        _, *pools = self.compiled(self.op)(*args, **options)
        kept = np.ones((N, S), bool)
        kept.reshape(-1)[np.asarray([0, 5, 6, 30, 31, 35])] = False
        for before, after in zip(args[3:5], pools):
            old, new = (np.asarray(x).swapaxes(1, 2) for x in (before, after))
            np.testing.assert_array_equal(new[kept], old[kept])
            assert (new[~kept] != old[~kept]).any()

    def test_nan_of_one_token_stays_there(self) -> None:
        shape = PARTIAL
        args, options = inputs(shape, list(range(S, S + 13)), 2)
        want_q, want_k, _ = self.compiled(self.op)(*args, **options)
        poisoned = (args[0].at[3].set(jnp.nan), *args[1:])
        got_q, got_k, _ = self.compiled(self.op)(*poisoned, **options)
        others = [t for t in range(13) if t != 3]
        np.testing.assert_array_equal(_bytes(got_q)[others], _bytes(want_q)[others])
        assert np.isnan(np.asarray(got_q[3].astype(jnp.float32))).all()
        np.testing.assert_array_equal(_bytes(got_k[2:]), _bytes(want_k[2:]))

    def _serves(self, dtype: jnp.dtype) -> bool:
        return not self.typed_pools_only or value_dtype(dtype) == dtype


def _bytes(x: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def _steps_apart(a: jax.Array, b: jax.Array) -> int:
    """How many representable values lie between the arrays at most; zeros of both signs are one."""
    x = np.ascontiguousarray(np.asarray(a))
    y = np.ascontiguousarray(np.asarray(b))
    signed = np.dtype(f"i{x.dtype.itemsize}")
    integers = [v.view(signed).astype(np.int64) for v in (x, y)]
    if x.dtype != np.int8:
        lowest = np.iinfo(signed).min
        integers = [np.where(v < 0, lowest - v, v) for v in integers]
    return int(np.abs(integers[0] - integers[1]).max(initial=0))


def _largest_steps_apart(a: jax.Array, b: jax.Array) -> float:
    """The difference in steps of the largest value of each head: the difference of two products may cancel."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return np.inf  # integers, and the bits of values, are held to neighbouring ones
    x, y = (np.asarray(v).astype(np.float64) for v in (a, b))
    largest = np.abs(y).max(-1, keepdims=True, initial=0)
    step = 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-30))) - jnp.finfo(a.dtype).nmant)
    return float((np.abs(x - y) / step).max(initial=0))
