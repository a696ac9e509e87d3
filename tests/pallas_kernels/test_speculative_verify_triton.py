"""Verification in Pallas-Triton, interpreted: the contract, and what the backend refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.speculative_verify import triton, tuning
from pallas_kernels.speculative_verify.cases import kernel_cases
from tests.pallas_kernels.speculative_verify_cases import SpeculativeVerifyContract, random_case
from tests.pallas_kernels.speculative_verify_law import NODES, ROWS

# Small tiles: a row of 300 tokens needs several.
SMALL = tuning.Choice(tile=128, row_warps=4, groups=2, residual_warps=1)


class TestSpeculativeVerifyTriton(SpeculativeVerifyContract):
    op = staticmethod(partial(triton.speculative_verify, choice=SMALL, interpret=True))


def test_refusals() -> None:
    args = random_case([3] * ROWS, 1, True, seed=0)
    for changed, options, word in (
        (args[0].astype(jnp.int32), {"max_nodes": 9}, "int32"),
        (args[0], {"max_nodes": 5000}, "5000 nodes"),
        (jax.ShapeDtypeStruct((NODES, 1 << 20), jnp.float32), {"max_nodes": 9}, "vocabulary"),
    ):
        ok, reason = triton.supports(changed, *args[1:], **options)
        assert not ok
        assert word in reason


@pytest.mark.parametrize("case", kernel_cases(), ids=lambda case: case.name)
def test_cases_are_supported(case) -> None:  # type: ignore[no-untyped-def]
    args = jax.eval_shape(case.inputs, jax.random.key(0))
    ok, reason = triton.supports(*args, max_nodes=61)
    assert ok, reason
