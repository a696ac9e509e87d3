"""The truncated draw in XLA and its reference: the contract, and the search that they share with the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sampling import reference, xla
from pallas_kernels.sampling.search import largest_reaching
from tests.pallas_kernels.compiled import jitted
from tests.pallas_kernels.sampling_cases import SHAPES, P, Row, TruncatedDrawContract, arguments, bits


class TestTruncatedDrawReference(TruncatedDrawContract):
    op = staticmethod(reference.truncated_draw)


class TestTruncatedDrawXla(TruncatedDrawContract):
    op = staticmethod(xla.truncated_draw)

    def test_no_sort(self) -> None:
        args = arguments([Row()] * 2, *SHAPES[0])
        assert "stablehlo.sort" not in jax.jit(xla.truncated_draw).lower(*args).as_text()

    def test_padding_changes_no_bit(self) -> None:
        row = Row(top_k=200, top_p=0.9, min_p=1e-4)
        some, more = (bits(jitted(xla.truncated_draw)(*arguments([row] * n, *SHAPES[0]))) for n in (P, 13))
        np.testing.assert_array_equal(some[0], more[0])

    def test_integer_logits_are_refused(self) -> None:
        args = arguments([Row()], *SHAPES[0])
        ok, reason = xla.supports(args[0].astype(jnp.int32), *args[1:])
        assert not ok
        assert "int32" in reason


EXTREMES = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-38,
    1.0,
    np.nextafter(np.float32(1), np.float32(2)),
    -1.0,
    3e38,
    -3e38,
]


class TestSearch:
    @settings(max_examples=100, deadline=None)
    @given(
        values=st.lists(st.sampled_from(EXTREMES) | st.floats(-5, 5, width=32), min_size=12, max_size=12),
        k=st.integers(1, 12),
    )
    def test_kth_largest(self, values: list[float], k: int) -> None:
        x_V = np.array(values, np.float32)
        found = _kth(jnp.asarray(x_V), jnp.int32(k))
        # Devices may flush the smallest numbers to zero.
        np.testing.assert_allclose(found, np.sort(x_V)[-k], atol=2e-38, rtol=0)

    @pytest.mark.parametrize("k", [1, 500])
    def test_few_passes(self, k: int) -> None:
        """About log2(V) passes, and not more with ties."""
        rng = np.random.default_rng(0)
        for x_V in (rng.normal(size=4096), np.round(rng.normal(size=4096) * 50) / 50):
            assert _passes(jnp.asarray(x_V, jnp.float32), jnp.int32(k)) <= 18


def _measure(x_V: jax.Array, pivot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    above_V = x_V >= pivot
    return (
        above_V.sum(),
        jnp.where(above_V, x_V, jnp.inf).min(),
        jnp.where(above_V, -jnp.inf, x_V).max(),
    )


@jax.jit
def _kth(x_V: jax.Array, k: jax.Array) -> jax.Array:
    return largest_reaching(lambda pivot: _measure(x_V, pivot), k, jnp.float32(-jnp.inf), x_V.max())


def _passes(x_V: jax.Array, k: jax.Array) -> int:
    pivots: list[float] = []

    def measure(pivot: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        pivots.append(float(pivot))
        return _measure(x_V, pivot)

    with jax.disable_jit():
        largest_reaching(measure, k, jnp.float32(-jnp.inf), x_V.max())
    return len(pivots)
