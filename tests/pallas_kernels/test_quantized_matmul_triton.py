"""Quantized matrix product in Pallas-Triton, in interpret mode: the contract, and every way to cut it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import triton, tuning
from pallas_kernels.quantized_matmul.cases import kernel_cases
from pallas_kernels.quantized_matmul.reference import quantized_matmul as reference
from pallas_kernels.quantized_matmul.tuning import Choice, Facts
from tests.pallas_kernels.quantized_matmul_cases import QuantizedMatmulContract, draw, run

OP = partial(triton.quantized_matmul, interpret=True)


class TestTriton(QuantizedMatmulContract):
    op = staticmethod(OP)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("int4-g128", Choice(32, 8, 64, 4)),
        ("awq", Choice(64, 16, 32, 3)),
        ("int8-g64", Choice(32, 16, 32, 16)),
        ("w8a8-int8", Choice(32, 8, 64, 1)),
    ],
)
def test_choices(kind: str, choice: Choice) -> None:
    """Splits that do not divide the steps, or outnumber them, and blocks that do not divide the sizes."""
    x_TI, w = draw(kind, 9, 80, 640, jnp.bfloat16)
    bias_O = jnp.arange(80, dtype=jnp.float32)
    want = run(reference, x_TI, w, bias_O)
    got = run(partial(OP, choice=choice), x_TI, w, bias_O)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_choice_that_mixes_groups_is_refused() -> None:
    x_TI, w = draw("int8-g64", 1, 48, 256, jnp.bfloat16)
    with pytest.raises(ValueError, match="divisors of 128 stored bytes and of the group 64"):
        OP(x_TI, w, choice=Choice(32, 8, 128, 1))


def test_supports() -> None:
    x_TI, fp8 = jax.eval_shape(lambda: draw("fp8", 2, 48, 256, jnp.bfloat16))
    assert triton.supports(x_TI, fp8, generation="hopper") == (True, "")
    ok, why = triton.supports(x_TI, fp8, generation="ampere")
    assert not ok
    assert "float8_e4m3fn" in why
    _, int8 = jax.eval_shape(lambda: draw("int8", 2, 48, 256, jnp.bfloat16))
    assert triton.supports(x_TI, int8, generation="ampere")[0]
    assert not triton.supports(jax.ShapeDtypeStruct((2, 256), jnp.int8), int8)[0]
    large = replace(
        int8,
        values_JOP=jax.ShapeDtypeStruct((2, 12 << 20, 128), jnp.int8),
        scale_GO=jax.ShapeDtypeStruct((1, 12 << 20), jnp.float32),
    )
    ok, why = triton.supports(x_TI, large)
    assert not ok
    assert "32-bit offsets" in why


def test_rule_of_choices() -> None:
    """Any facts give a choice whose steps lie within a tile and a group."""
    for case in kernel_cases():
        assert case.candidates
    for tokens in (1, 4, 16, 64, 128, 4096):
        for group in (None, 32, 64, 128, 256):
            for format, stored in (("int4", 64), ("int8", 128)):
                of = Facts(tokens, 4096, 4096, format, group, None, 2)  # type: ignore[arg-type]
                for choice in tuning.candidates("hopper", of):
                    assert stored % choice.columns == 0
                    assert (group or 128) % choice.columns == 0
                    assert choice.splits <= tuning.MOST_SPLITS


def test_choice_depends_on_the_bucket_only() -> None:
    _, w = jax.eval_shape(lambda: draw("int4-g128", 1, 48, 256, jnp.bfloat16))
    choices = {
        tuning.choose("hopper", tuning.facts(jax.ShapeDtypeStruct((T, 256), jnp.bfloat16), w))
        for T in (17, 20, 32)
    }
    assert len(choices) == 1
