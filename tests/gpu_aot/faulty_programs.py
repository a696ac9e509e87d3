"""Programs with one fault each, which the checks must find; each is compiled in a process of its own."""

import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.aot.compile import Program
from pallas_kernels.triton_call import triton_call

ROWS = 64


def sound() -> Program:
    """A matrix product as it should be."""
    return _product(width=64, dtype=jnp.bfloat16)


def spilling() -> Program:
    """An accumulator that is far too large for the registers of one warp."""
    return _product(width=256, dtype=jnp.bfloat16, rows=256, num_warps=1)


def too_much_shared_memory() -> Program:
    """Tiles of many stages."""
    return _product(width=256, dtype=jnp.bfloat16, step=256, num_stages=6, num_warps=8)


def without_tensor_cores() -> Program:
    """Exact float32 products."""
    return _product(width=16, dtype=jnp.float32, num_stages=1)


def not_in_place() -> Program:
    """A donated buffer that no output can take over, because the types differ."""
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    return Program(lambda x: (x * 2).astype(jnp.bfloat16), (x,), donate=(0,))


def aborting() -> Program:
    """What an error of LLVM does to the process."""
    os.abort()


def raising() -> Program:
    """An error of Python."""
    raise ValueError("this shape is not supported")


def _product(
    *, width: int, dtype: jnp.dtype, rows: int = ROWS, step: int = 64, num_warps: int = 4, num_stages: int = 2
) -> Program:
    """``x @ w`` of a 1024 x 1024 weight, ``rows`` x ``width`` of the result in each program."""

    precision = "highest" if dtype == jnp.float32 else None  # else TF32, on tensor cores

    def kernel(x, w, out) -> None:  # type: ignore[no-untyped-def]
        row, column = jnp.arange(rows), pl.program_id(0) * width + jnp.arange(width)

        def add(i: jax.Array, sum_RC: jax.Array) -> jax.Array:
            inner = i * step + jnp.arange(step)
            x_RI = plgpu.load(x.at[row[:, None], inner[None, :]])
            w_IC = plgpu.load(w.at[inner[:, None], column[None, :]])
            return sum_RC + jnp.dot(x_RI, w_IC, precision=precision, preferred_element_type=jnp.float32)

        sum_RC = jax.lax.fori_loop(0, 1024 // step, add, jnp.zeros((rows, width), jnp.float32))
        plgpu.store(out.at[row[:, None], column[None, :]], sum_RC.astype(dtype))

    call = triton_call(
        kernel,
        grid=(1024 // width,),
        out_shape=jax.ShapeDtypeStruct((rows, 1024), dtype),
        name="planted",
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=False,
    )
    return Program(
        call, (jax.ShapeDtypeStruct((rows, 1024), dtype), jax.ShapeDtypeStruct((1024, 1024), dtype))
    )
