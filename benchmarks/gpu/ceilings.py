"""Part "ceilings": what this device can do at best, as everything else is compared with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.context import Context
from benchmarks.gpu.timing import SMOKE_PLAN, Plan, Repeated, Timing, host_seconds

_COPY_BYTES = 2 << 30
_MATRIX = 8192
_TYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "fp8": (jnp.float8_e4m3fn, jnp.bfloat16),
    "int8": (jnp.int8, jnp.int32),
    "fp16": (jnp.float16, jnp.float16),
    "tf32": (jnp.float32, jnp.float32),
    "fp32": (jnp.float32, jnp.float32),
}
"""Operand and result type of the matrix products."""

_RELATIVE = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0, "int8": 2.0, "tf32": 0.5, "fp32": 0.07}
"""Expected speed against bf16, to choose the number of calls."""


def run(context: Context) -> None:
    """Measures the copy, the read, a kernel that does nothing, and matrix products by operand type."""
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "copy": partial(_copy, context),
        "launch": partial(_launch, context),
        **{f"matmul-{name}": partial(_matmul, context, name) for name in ("bf16", "fp8", "int8")},
        "read": partial(_read, context),
        **{f"matmul-{name}": partial(_matmul, context, name) for name in ("fp16", "tf32", "fp32")},
    }
    for name in context.plan(cases):
        context.attempt(name, 1.0, cases[name])


def _measure(
    context: Context, function: Callable[..., Any], inputs: tuple[jax.Array, ...], expected: float
) -> Timing:
    plan = SMOKE_PLAN if context.settings.smoke else Plan.make(expected, 1 << 62, 1, 0)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    return Repeated(function, (), shapes, plan).compile().measure((inputs,) * plan.sets)


def _numbers(context: Context) -> jax.Array:
    """Many random 32-bit numbers."""
    count = (1 << 16) if context.settings.smoke else _COPY_BYTES // 4
    return jax.jit(lambda: jax.random.bits(jax.random.key(0), (count,), jnp.uint32))()


def _copy(context: Context) -> dict[str, Any]:
    x = _numbers(context)
    timing = _measure(context, lambda x: x ^ 1, (x,), 2 * x.nbytes / context.ceilings.bandwidth)
    return _bandwidth(timing, 2 * x.nbytes)


def _read(context: Context) -> dict[str, Any]:
    x = _numbers(context)
    expected = x.nbytes / context.ceilings.bandwidth
    return _bandwidth(_measure(context, jnp.bitwise_xor.reduce, (x,), expected), x.nbytes)


def _bandwidth(timing: Timing, moved: int) -> dict[str, Any]:
    rate = moved / timing.best
    return {"seconds": timing.best, "bytes_per_second": rate, "summary": f"{rate / 1e9:.0f} GB/s"}


def _launch(context: Context) -> dict[str, Any]:
    x = jnp.arange(8, dtype=jnp.int32)
    timing = _measure(context, lambda x: x + 1, (x,), 2e-6)
    dispatch = host_seconds(jax.jit(lambda x: x + 1), x)
    return {
        "seconds": timing.best,
        "dispatch_seconds": dispatch,
        "summary": f"{1e6 * timing.best:.1f} us in a program, {1e6 * dispatch:.1f} us to dispatch a program",
    }


def _matmul(context: Context, name: str) -> dict[str, Any]:
    size = 64 if context.settings.smoke else _MATRIX
    operand, result = _TYPES[name]
    keys = jax.random.split(jax.random.key(0))
    x, y = (_random(key, (size, size), operand) for key in keys)
    precision = jax.lax.Precision.HIGHEST if name == "fp32" else jax.lax.Precision.DEFAULT

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot(x, y, precision=precision, preferred_element_type=result)

    flops = 2 * size**3
    fastest = context.ceilings.tflops.get("bf16", 0.1) * _RELATIVE[name]
    timing = _measure(context, product, (x, y), flops / (1e12 * fastest))
    rate = flops / timing.best / 1e12
    return {"seconds": timing.best, "tflops": rate, "summary": f"{rate:.1f} TFLOP/s"}


def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.dtype(dtype) == jnp.int8:
        return jax.jit(lambda: jax.random.randint(key, shape, -127, 128, jnp.int8))()
    return jax.jit(lambda: jax.random.normal(key, shape, jnp.float32).astype(dtype))()
