"""The thread block of the Mosaic product of bytes: one warpgroup loads tiles by TMA, two multiply them with wgmma.

Hopper's tensor cores add products of float8 numbers with about 14 bits, so that long sums lose digits (DeepSeek-V3
technical report, 2024, section 3.3.2). Therefore the sum of each tile of 128 inputs is taken out and added in float32.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.weights import TILE

Ref = Any
ROWS = 64
COMPUTE_WARPGROUPS = 2
BLOCK_M = ROWS * COMPUTE_WARPGROUPS
LOADER = COMPUTE_WARPGROUPS
LOADER_REGISTERS, COMPUTE_REGISTERS = 40, 232


@dataclass(frozen=True)
class Plan:
    """Everything static.

    Attributes:
        T, O, J: sizes, see ``weights``; T is a multiple of ``BLOCK_M``, O of ``block_o``.
        dtype: float8_e4m3fn or int8, of activations and weights.
        block_o: outputs of a thread block.
        stages: tiles in flight.
    """

    T: int
    O: int
    J: int
    dtype: Any
    out_dtype: Any
    has_bias: bool
    block_o: int
    stages: int

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32


@dataclass(frozen=True)
class _Buffers:
    """Shared memory and barriers; the leading index is the stage, of y the warpgroup."""

    x_SMi: Ref
    w_SOi: Ref
    y_WMO: Ref
    ready_S: Ref
    free_S: Ref


def multiply(plan: Plan, interpret: Any) -> Any:
    """The function of x ``[T, J * 128]``, values ``[J, O, 128]``, float32 scales ``[O]`` and ``[T]``, and a float32
    bias ``[O]`` if there is one. Returns ``[T, O]``.

    Args:
        interpret: None, or ``plgpu.InterpretGPUParams``.
    """
    bytes_tiled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    out_columns = 128 // jnp.dtype(plan.out_dtype).itemsize
    out_tiled = (plgpu.TilingTransform((8, out_columns)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        functools.partial(_thread_block, plan),
        out_type=jax.ShapeDtypeStruct((plan.T, plan.O), plan.out_dtype),
        scratch_types={
            "x_SMi": plgpu.SMEM((plan.stages, BLOCK_M, TILE), plan.dtype, transforms=bytes_tiled),
            "w_SOi": plgpu.SMEM((plan.stages, plan.block_o, TILE), plan.dtype, transforms=bytes_tiled),
            "y_WMO": plgpu.SMEM(
                (COMPUTE_WARPGROUPS, ROWS, plan.block_o), plan.out_dtype, transforms=out_tiled
            ),
            "ready_S": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
            "free_S": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=plan.stages),
        },
        grid=(plan.O // plan.block_o, plan.T // BLOCK_M),
        grid_names=("outputs", "tokens"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="quantized_matmul_w8a8",
        interpret=interpret,
    )


def _thread_block(
    plan: Plan, x_TI: Ref, values_JOP: Ref, scale_O: Ref, scale_T: Ref, *rest: Ref, **buffers: Ref
) -> None:
    bias_O, y_TO = (rest[0] if plan.has_bias else None), rest[-1]
    smem = _Buffers(**buffers)
    warpgroup = jax.lax.axis_index("warpgroup")
    m = jax.lax.axis_index("tokens") * BLOCK_M
    o = jax.lax.axis_index("outputs") * plan.block_o

    @pl.when(warpgroup == LOADER)
    def _() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        _load(plan, x_TI, values_JOP, m, o, smem)

    @pl.when(warpgroup != LOADER)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        mine = m + warpgroup * ROWS
        y_MO = _sum(plan, warpgroup, smem).astype(jnp.float32)
        y_MO = y_MO * _across(plan, scale_O, o) * _down(plan, scale_T, mine)
        if bias_O is not None:
            y_MO = y_MO + _across(plan, bias_O, o)
        smem.y_WMO[warpgroup] = y_MO.astype(plan.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.y_WMO.at[warpgroup], y_TO.at[pl.ds(mine, ROWS), pl.ds(o, plan.block_o)])
        plgpu.wait_smem_to_gmem(0)


def _load(plan: Plan, x_TI: Ref, values_JOP: Ref, m: jax.Array, o: jax.Array, smem: _Buffers) -> None:
    """Fills the stages in turn."""

    def fill(j: jax.Array, _: None) -> None:
        stage = jax.lax.rem(j, jnp.int32(plan.stages))
        pl.when(j >= plan.stages)(lambda: plgpu.barrier_wait(smem.free_S.at[stage]))
        ready = smem.ready_S.at[stage]
        plgpu.copy_gmem_to_smem(
            x_TI.at[pl.ds(m, BLOCK_M), pl.ds(j * TILE, TILE)], smem.x_SMi.at[stage], ready
        )
        plgpu.copy_gmem_to_smem(values_JOP.at[j, pl.ds(o, plan.block_o)], smem.w_SOi.at[stage], ready)

    jax.lax.fori_loop(0, plan.J, fill, None)

    # Nobody may leave a barrier with arrivals that were never observed.
    def drain(j: jax.Array, _: None) -> None:
        plgpu.barrier_wait(smem.free_S.at[jax.lax.rem(j, jnp.int32(plan.stages))])

    jax.lax.fori_loop(max(0, plan.J - plan.stages), plan.J, drain, None)


def _sum(plan: Plan, warpgroup: jax.Array, smem: _Buffers) -> jax.Array:
    """Products of a warpgroup's rows, tile by tile."""

    def add(j: jax.Array, sum_MO: jax.Array) -> jax.Array:
        stage = jax.lax.rem(j, jnp.int32(plan.stages))
        plgpu.barrier_wait(smem.ready_S.at[stage])

        def product(part_MO: Ref) -> jax.Array:
            x_Mi = smem.x_SMi.at[stage, pl.ds(warpgroup * ROWS, ROWS)]
            plgpu.wgmma(part_MO, x_Mi, smem.w_SOi.at[stage].transpose((1, 0)))
            return part_MO[...]

        part_MO = pl.run_scoped(product, plgpu.ACC((ROWS, plan.block_o), plan.sum_dtype))
        plgpu.barrier_arrive(smem.free_S.at[stage])
        return sum_MO + part_MO

    zero_MO = plgpu.layout_cast(jnp.zeros((ROWS, plan.block_o), plan.sum_dtype), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, plan.J, add, zero_MO)


def _across(plan: Plan, ref_O: Ref, o: jax.Array) -> jax.Array:
    """A number per output, for each row."""
    x_O = plgpu.load(ref_O.at[pl.ds(o, plan.block_o)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)  # type: ignore[call-arg]
    return jax.lax.broadcast_in_dim(x_O, (ROWS, plan.block_o), (1,))


def _down(plan: Plan, ref_T: Ref, at: jax.Array) -> jax.Array:
    """A number per row, for each output."""
    x_M = plgpu.load(ref_T.at[pl.ds(at, ROWS)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)  # type: ignore[call-arg]
    return jax.lax.broadcast_in_dim(x_M, (ROWS, plan.block_o), (0,))
