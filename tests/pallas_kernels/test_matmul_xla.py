"""Matrix products in XLA: the contracts, and what only these backends promise."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import xla as grouped
from pallas_kernels.linear import xla, xla_cpu
from tests.pallas_kernels.hlo_checks import compiled, makers
from tests.pallas_kernels.matmul_cases import GroupedMatmulContract, LinearContract


class TestLinearXla(LinearContract):
    op = staticmethod(xla.linear)


class TestLinearXlaCpu(LinearContract):
    op = staticmethod(xla_cpu.linear)

    def test_one_bfloat16_row_does_not_convert_the_weight(self) -> None:
        x, w = jax.ShapeDtypeStruct((1, 40), jnp.bfloat16), jax.ShapeDtypeStruct((997, 40), jnp.bfloat16)
        text = compiled(jax.jit(xla_cpu.linear).lower(x, w)).as_text()
        assert [line for line in makers(text, (997,)) if "f32[997,40]" in line] == []


class TestGroupedMatmulXla(GroupedMatmulContract):
    op = staticmethod(grouped.grouped_matmul)

    def test_bfloat16_experts_are_not_converted_as_a_whole(self) -> None:
        x, w = jax.ShapeDtypeStruct((8, 40), jnp.bfloat16), jax.ShapeDtypeStruct((997, 8, 40), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((997,), jnp.int32)
        text = compiled(jax.jit(grouped.grouped_matmul).lower(x, w, sizes)).as_text()
        assert [line for line in makers(text, (997,)) if ",40]" in line] == []

    def test_tiles_grow_with_the_rows_per_expert(self) -> None:
        assert [grouped.tile_rows(T, 8) for T in (1, 64, 65, 129, 4096)] == [8, 8, 16, 32, 64]
