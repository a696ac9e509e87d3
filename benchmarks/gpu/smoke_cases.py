"""Tiny kernels, interpreted on a CPU: what ``run.py --smoke`` measures in place of the shipped shapes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Work
from pallas_kernels.triton_call import triton_call

_ROWS, _WIDTH = 8, 32


@dataclass(frozen=True)
class Choice:
    """``rows`` of a block."""

    rows: int
    num_warps: int = 4


def _scale(rows: int, x_ref: Any, out_ref: Any) -> None:
    from jax.experimental import pallas as pl

    row = pl.program_id(0) * rows + jnp.arange(rows)[:, None]
    at = (row, jnp.arange(_WIDTH)[None, :])
    plgpu.store(out_ref.at[at], plgpu.load(x_ref.at[at]) * 2)


def _doubled(choice: Choice, in_place: bool, x: jax.Array) -> jax.Array:
    return triton_call(
        partial(_scale, choice.rows),
        grid=(_ROWS // choice.rows,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="doubled",
        num_warps=choice.num_warps,
        num_stages=1,
        interpret=True,
        input_output_aliases={0: 0} if in_place else None,
    )(x)


def _case(name: str, in_place: bool, quick: bool) -> KernelCase:
    def build(generation: Generation, choice: Choice | None) -> partial:
        return partial(_doubled, choice or Choice(4), in_place)

    return KernelCase(
        op="smoke",
        name=name,
        backend="triton",
        generations=("ampere", "ada", "hopper", "blackwell"),
        build=build,
        oracle=lambda x: x.astype(jnp.float32) * 2,
        baseline=lambda x: x + x,
        inputs=lambda key: (jax.random.normal(key, (_ROWS, _WIDTH), jnp.bfloat16),),
        work=Work(bytes=2 * 2 * _ROWS * _WIDTH, flops=_ROWS * _WIDTH),
        tolerance=1e-6,
        candidates=(Choice(4), Choice(8), Choice(2)),
        tuning_key=f"w{_WIDTH}",
        donate=(0,) if in_place else (),
        quick=quick,
    )


def all_cases() -> tuple[KernelCase, ...]:
    """One that writes a new array, one that updates its argument, and one for the part "more-kernels"."""
    return (_case("doubled", False, True), _case("doubled-in-place", True, True), _case("more", False, False))
