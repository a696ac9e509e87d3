"""The latent attention in Pallas-Triton: the contract in interpret mode, and what only this backend promises."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpus import Generation
from pallas_kernels.mla_attention import cases, reference, triton, tuning
from tests.pallas_kernels.mla_attention_cases import MlaAttentionContract, Shape, inputs, run

WHOLE = tuning.Choice(heads=4, slots=32, splits=1, num_warps=1, num_stages=1)
SHARES = tuning.Choice(heads=2, slots=16, splits=4, num_warps=1, num_stages=1)


def _op(choice: tuning.Choice | None) -> functools.partial:
    return functools.partial(triton.mla_attention, choice=choice, interpret=True)


class TestMlaAttentionTriton(MlaAttentionContract):
    """The context in shares that are merged; heads in several tiles, some of them partly filled."""

    op = staticmethod(_op(SHARES))
    typed_pools_only = True


@pytest.mark.slow
class TestMlaAttentionTritonWhole(MlaAttentionContract):
    op = staticmethod(_op(WHOLE))
    typed_pools_only = True


def test_one_program_for_the_whole_context() -> None:
    args, options = inputs(Shape(), ((1, 480), (2, 33), (5, 9), (1, 1)))
    got, want = run(_op(WHOLE), args, options), run(reference.mla_attention, args, options)
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


@pytest.mark.slow
def test_the_rule_of_the_table_serves_many_heads() -> None:
    shape = Shape(R=2, T=2, H=20, r=64, d=16, kv_dtype=jnp.bfloat16, q_dtype=jnp.bfloat16)
    args, options = inputs(shape, ((1, 30), (1, 48)))
    got, want = run(_op(None), args, options), run(reference.mla_attention, args, options)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"kv_dtype": jnp.uint8}, "typed pools"),
        ({"kv_dtype": jnp.float8_e4m3fn}, "Ampere"),
        ({"r": 1024}, "1024"),
        ({"q_dtype": jnp.int8}, "int8"),
        ({"N": 1 << 20, "kv_dtype": jnp.int8, "r": 512}, ""),
        ({"N": 3 << 20, "kv_dtype": jnp.int8, "r": 512}, ""),
        ({"N": (1 << 20) + 1, "kv_dtype": jnp.int8, "r": 512}, "32-bit"),
    ],
)
def test_supports(change: dict, word: str) -> None:
    shape = Shape(**{"N": 9, **change})
    generation: Generation = "ampere"
    q = [jax.ShapeDtypeStruct((shape.T, shape.H, e), shape.q_dtype) for e in (shape.r, shape.d)]
    pools = [
        jax.ShapeDtypeStruct((shape.N, 1, S, e), shape.kv_dtype) for S in (4,) for e in (shape.r, shape.d)
    ]
    table, start, context = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((5, 12), (6,), (5,)))
    ok, reason = triton.supports(*q, *pools, table, start, context, scale=1.0, generation=generation)
    assert ok == (word == "")
    assert word in reason


def test_splits_depend_on_shapes_only_and_fill_the_card() -> None:
    for generation in ("ampere", "ada", "hopper", "blackwell"):
        for heads in (16, 128):
            for tokens in (1, 8, 64, 300):
                choice = tuning.choose(generation, heads, 512, "bfloat16", "bfloat16", tokens)
                sizes = (choice.heads, choice.slots, choice.splits, choice.num_warps)
                assert all(math.log2(size).is_integer() for size in sizes)
                assert choice.splits == 1 or choice.splits * tokens * heads // choice.heads <= 300


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in cases.kernel_cases()}) == len(cases.SHAPES)
