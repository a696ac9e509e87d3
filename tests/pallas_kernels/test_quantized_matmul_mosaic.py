"""Quantized matrix product in Pallas Mosaic GPU, in interpret mode with race detection: the contract."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.quantized_matmul import mosaic
from pallas_kernels.quantized_matmul.reference import quantized_matmul as reference
from pallas_kernels.quantized_matmul.tuning import Choice
from tests.pallas_kernels.quantized_matmul_cases import QuantizedMatmulContract, draw, run

needs_mosaic = pytest.mark.skipif(
    not mosaic.has_mosaic(), reason=f"Mosaic GPU of jax 0.11 and newer; this is {jax.__version__}"
)
OP = partial(mosaic.quantized_matmul, interpret=True)


@pytest.fixture
def _no_races() -> Iterator[None]:
    """What the interpreter saw is checked after each test."""
    from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import get_races

    yield
    assert not get_races().races_found


@needs_mosaic
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_no_races")
class TestMosaic(QuantizedMatmulContract):
    op = staticmethod(OP)
    kinds = ("w8a8-fp8", "w8a8-int8", "w8a8-fp8-static")
    alike = ()
    sizes = ((70, 128, 320), (130, 128, 128), (70, 256, 200))
    tokens = st.integers(mosaic.LEAST_TOKENS, 260)
    outputs = st.sampled_from([128, 256, 384])
    # The interpreter multiplies float8 numbers with the CPU's product, whose rounding depends on a row's place.
    placed = "w8a8-int8"
    padded = ("w8a8-fp8", "w8a8-int8")


@needs_mosaic
@pytest.mark.usefixtures("_no_races")
def test_stages_are_reused() -> None:
    """More tiles of inputs than stages, and narrow blocks."""
    x_TI, w = draw("w8a8-fp8", 70, 128, 640, jnp.bfloat16)
    want = run(reference, x_TI, w)
    got = run(partial(OP, choice=Choice(64, 128, 128, 1, 4, 2)), x_TI, w)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(
    ("kind", "T", "O", "generation", "expected"),
    [
        ("w8a8-fp8", 128, 128, "ampere", "Hopper"),
        ("int8", 128, 128, "hopper", "activations"),
        ("w8a8-fp8", 16, 128, "hopper", "16 rows"),
        ("w8a8-fp8", 128, 96, "hopper", "96 outputs"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, kind: str, T: int, O: int, generation: str, expected: str
) -> None:
    monkeypatch.setattr(mosaic, "has_mosaic", lambda: True)
    x_TI, w = jax.eval_shape(lambda: draw(kind, T, O, 256, jnp.bfloat16))
    supports: Callable[..., tuple[bool, str]] = mosaic.supports
    ok, why = supports(x_TI, w, generation=generation)
    assert not ok
    assert expected in why


def test_older_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic.jax, "__version__", "0.10.2")
    ok, why = mosaic.supports(*jax.eval_shape(lambda: draw("w8a8-fp8", 128, 128, 256, jnp.bfloat16)))
    assert not ok
    assert "0.11" in why
