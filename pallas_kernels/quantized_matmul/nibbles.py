"""Two planes of 4-bit numbers out of a tile of bytes, inside a Triton kernel.

At full memory bandwidth a Hopper multiprocessor gets about 37 4-bit weights per clock and has 64 integer operations for
them. Conversion one by one costs more than that, so pairs are assembled in registers: a 4-bit number n in the low
mantissa bits of 128 (bfloat16, 0x43 above) or 1024 (float16, 0x64) is 128 + n or 1024 + n, and one packed multiply-add
takes the offset and the zero point off; both are exact. (Kim et al., "Who Says Elephants Can't Run", 2022, describe the
trick.) That is 11 instructions for 8 weights.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

OFFSETS = {jnp.dtype(jnp.bfloat16): 128, jnp.dtype(jnp.float16): 1024}

_UNPACK = """
{{
.reg .b32 n, one, p, q;
shr.u32 n, $2, {shift};
and.b32 n, n, 0x0F0F0F0F;
mov.b32 one, {one};
prmt.b32 p, n, {above}, 0x4140;
prmt.b32 q, n, {above}, 0x4342;
fma.rn.{pair} $0, p, one, $3;
fma.rn.{pair} $1, q, one, $4;
}}
"""
_PARTS = {
    jnp.dtype(jnp.bfloat16): {"one": "0x3F803F80", "above": "0x43434343", "pair": "bf16x2"},
    jnp.dtype(jnp.float16): {"one": "0x3C003C00", "above": "0x64646464", "pair": "f16x2"},
}


def assembly(dtype: jnp.dtype, shift: int) -> str:
    """PTX for the numbers from bit ``shift`` on.

    ``$2`` holds four bytes, ``$3`` and ``$4`` twice what takes the offset and the zero point off; results are ``$0``
    and ``$1``.
    """
    return _UNPACK.format(shift=shift, **_PARTS[dtype])


def unpack(
    bytes_OP: jax.Array, zero_O: jax.Array, zero_high_O: jax.Array, dtype: jnp.dtype, ptx: bool
) -> tuple[jax.Array, jax.Array]:
    """The low and the high 4-bit numbers, each minus its output's zero point.

    Args:
        bytes_OP: int8.
        zero_O, zero_high_O: int8 from 0 to 16, of the low and of the high numbers.
        dtype: of the results.
        ptx: for pairs, bfloat16 and float16 only; otherwise one by one, which runs anywhere.
    """
    if not ptx:
        low_OP, high_OP = bytes_OP & 15, (bytes_OP >> 4) & 15
        return (
            low_OP.astype(dtype) - zero_O[:, None].astype(dtype),
            high_OP.astype(dtype) - zero_high_O[:, None].astype(dtype),
        )
    return _pairs(bytes_OP, zero_O, dtype, 0), _pairs(bytes_OP, zero_high_O, dtype, 4)


def _pairs(bytes_OP: jax.Array, zero_O: jax.Array, dtype: jnp.dtype, shift: int) -> jax.Array:
    """The numbers from bit ``shift`` on, four bytes at a time."""
    dtype = jnp.dtype(dtype)
    offset_O = (-OFFSETS[dtype] - zero_O.astype(jnp.int32)).astype(dtype)
    (numbers_OP,) = plgpu.elementwise_inline_asm(
        assembly(dtype, shift),
        args=[bytes_OP, jnp.broadcast_to(offset_O[:, None], bytes_OP.shape)],
        constraints="=&r,=&r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(bytes_OP.shape, dtype)],
    )
    return numbers_OP
