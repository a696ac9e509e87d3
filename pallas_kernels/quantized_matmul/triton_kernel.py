"""The Triton kernel of the quantized matrix product.

A program computes some outputs of some tokens, transposed: the weight is the left operand, so that it is converted in
the registers in which the tensor cores take it, and few tokens fill a tensor core instruction (8 columns) as well as
many. Stored numbers are multiplied as small integers, exactly; each group's sum is scaled in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.quantized_matmul.nibbles import unpack
from pallas_kernels.quantized_matmul.tuning import Choice
from pallas_kernels.quantized_matmul.weights import INT4_MIDDLE, PLANE, TILE, Format

Ref = Any


@dataclass(frozen=True)
class Plan:
    """Everything static.

    Attributes:
        T, O, I, J, P: sizes, see ``weights``.
        group: inputs per scale; None: one scale per output.
        dtype: of the products' operands; int8 products are summed in int32.
        has_zero, has_x_scale, has_bias: which optional arrays are passed.
        assembly: convert int4 with PTX.
    """

    T: int
    O: int
    I: int
    J: int
    P: int
    format: Format
    group: int | None
    dtype: jnp.dtype
    has_zero: bool
    has_x_scale: bool
    has_bias: bool
    assembly: bool
    choice: Choice

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens first: programs that read the same weights run at the same time."""
        return -(-self.T // self.choice.block_m), -(-self.O // self.choice.block_o), self.choice.splits


@dataclass(frozen=True)
class _Refs:
    x_TI: Ref
    values_JOP: Ref
    scale_GO: Ref
    zero_GO: Ref
    x_scale_T: Ref
    bias_O: Ref
    y_STO: Ref


def make(plan: Plan) -> Callable[..., None]:
    """The kernel: references of x, values, scales, those optional arrays that there are, and of ``[splits, T, O]``."""

    def kernel(x_TI: Ref, values_JOP: Ref, scale_GO: Ref, *rest: Ref) -> None:
        optional, y_STO = list(rest[:-1]), rest[-1]
        zero_GO, x_scale_T, bias_O = (
            optional.pop(0) if there else None for there in (plan.has_zero, plan.has_x_scale, plan.has_bias)
        )
        _program(plan, _Refs(x_TI, values_JOP, scale_GO, zero_GO, x_scale_T, bias_O, y_STO))

    return kernel


def _program(plan: Plan, refs: _Refs) -> None:
    c = plan.choice
    m_M = pl.program_id(0) * c.block_m + jnp.arange(c.block_m)
    o_O = pl.program_id(1) * c.block_o + jnp.arange(c.block_o)
    split = pl.program_id(2)
    steps = plan.J * plan.P // c.columns
    each = -(-steps // c.splits)
    integers = jnp.issubdtype(plan.dtype, jnp.integer) and plan.group is None
    sum_OM = jnp.zeros((c.block_o, c.block_m), jnp.int32 if integers else jnp.float32)
    sum_OM = jax.lax.fori_loop(
        split * each,
        jnp.minimum((split + 1) * each, steps),
        lambda step, sum_OM: _step(plan, refs, step, m_M, o_O, sum_OM),
        sum_OM,
    )
    sum_OM = sum_OM.astype(jnp.float32)
    if plan.group is None:
        sum_OM = sum_OM * _row(refs.scale_GO, 0, o_O, plan.O)[:, None]
    if refs.x_scale_T is not None:
        sum_OM = sum_OM * _load(refs.x_scale_T.at[m_M], _within(m_M, plan.T))[None, :]
    if refs.bias_O is not None:
        sum_OM = sum_OM + _load(refs.bias_O.at[o_O], _within(o_O, plan.O)).astype(jnp.float32)[:, None]
    mask = _both(_within(m_M, plan.T), _within(o_O, plan.O))
    y_MO = sum_OM.T.astype(refs.y_STO.dtype)
    plgpu.store(refs.y_STO.at[split, m_M[:, None], o_O[None, :]], y_MO, mask=mask)


def _step(
    plan: Plan, refs: _Refs, step: jax.Array, m_M: jax.Array, o_O: jax.Array, sum_OM: jax.Array
) -> jax.Array:
    """Adds the products of some columns of a tile."""
    columns = plan.choice.columns
    per_tile = plan.P // columns
    j, first = step // per_tile, step % per_tile * columns
    c_C = first + jnp.arange(columns)
    ok_O = _within(o_O, plan.O)
    stored_OC = _load(
        refs.values_JOP.at[j, o_O[:, None], c_C[None, :]], None if ok_O is None else ok_O[:, None]
    )
    at = j * TILE + first
    if plan.format != "int4":
        x_MC = _tokens(plan, refs, m_M, at)
        zero_O = None if refs.zero_GO is None else _row(refs.zero_GO, _group(plan, at), o_O, plan.O)
        return _add(plan, refs, at, o_O, sum_OM, _dot(_number(stored_OC, zero_O, plan.dtype), x_MC))
    low, high = at, at + PLANE
    zero_O, zero_high_O = (_zero(plan, refs, start, o_O) for start in (low, high))
    low_OC, high_OC = unpack(stored_OC, zero_O, zero_high_O, plan.dtype, plan.assembly)
    low_OM, high_OM = (
        _dot(w_OC, _tokens(plan, refs, m_M, start)) for w_OC, start in ((low_OC, low), (high_OC, high))
    )
    if plan.group is None or plan.group >= TILE:  # Both planes have the same scale.
        return _add(plan, refs, low, o_O, sum_OM, low_OM + high_OM)
    sum_OM = _add(plan, refs, low, o_O, sum_OM, low_OM)
    return _add(plan, refs, high, o_O, sum_OM, high_OM)


def _add(
    plan: Plan, refs: _Refs, at: jax.Array, o_O: jax.Array, sum_OM: jax.Array, part_OM: jax.Array
) -> jax.Array:
    """Adds a sum over inputs from ``at`` on, which are of one group."""
    if plan.group is None:
        return sum_OM + part_OM
    return sum_OM + part_OM.astype(jnp.float32) * _row(refs.scale_GO, _group(plan, at), o_O, plan.O)[:, None]


def _tokens(plan: Plan, refs: _Refs, m_M: jax.Array, at: jax.Array) -> jax.Array:
    """Activations of the inputs from ``at`` on."""
    k_C = at + jnp.arange(plan.choice.columns)
    ok_C = None if plan.I % TILE == 0 else k_C < plan.I
    x_MC = _load(refs.x_TI.at[m_M[:, None], k_C[None, :]], _both(_within(m_M, plan.T), ok_C))
    return x_MC.astype(plan.dtype)


def _number(stored_OC: jax.Array, zero_O: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    w_OC = stored_OC.astype(dtype)
    return w_OC if zero_O is None else w_OC - zero_O[:, None].astype(dtype)


def _zero(plan: Plan, refs: _Refs, at: jax.Array, o_O: jax.Array) -> jax.Array:
    if refs.zero_GO is None:
        return jnp.full(o_O.shape, INT4_MIDDLE, jnp.int8)
    return _row(refs.zero_GO, _group(plan, at), o_O, plan.O)


def _group(plan: Plan, at: jax.Array) -> Any:
    return 0 if plan.group is None else at // plan.group


def _row(ref_GO: Ref, g: Any, o_O: jax.Array, O: int) -> jax.Array:
    """A number per output; scales in float32."""
    x_O = _load(ref_GO.at[g, o_O], _within(o_O, O))
    return x_O if x_O.dtype == jnp.int8 else x_O.astype(jnp.float32)


def _dot(w_OC: jax.Array, x_MC: jax.Array) -> jax.Array:
    """Sums in float32, or int32 of int8; float32 operands are not rounded."""
    integers = jnp.issubdtype(w_OC.dtype, jnp.integer)
    return jax.lax.dot_general(
        w_OC,
        x_MC,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if w_OC.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )


def _within(index: jax.Array, size: int) -> jax.Array | None:
    """None where the blocks divide the size."""
    return None if size % index.shape[0] == 0 else index < size


def _both(row: jax.Array | None, column: jax.Array | None) -> jax.Array | None:
    if row is None:
        return None if column is None else column[None, :]
    return row[:, None] if column is None else row[:, None] & column[None, :]


def _load(ref: Ref, mask: jax.Array | None) -> jax.Array:
    """0 outside of the mask."""
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=mask, other=0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0)
