"""Compiled ops for the tests: each once, and those whose speed does not matter without optimization."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from tests.support.compiling import OPTIMIZED, UNOPTIMIZED

Op = Callable[..., Any]


@lru_cache(maxsize=256)
def jitted(op: Op, *static_argnames: str) -> Op:
    """The op, compiled once for each shape however many tests use it."""
    return jax.jit(op, static_argnames=static_argnames, compiler_options=options_for(op))


@lru_cache(maxsize=64)
def optimized(op: Op) -> Op:
    """The op with all of LLVM's optimizations, for comparisons of bits: they decide on fused multiply-adds."""
    return jax.jit(op, compiler_options=OPTIMIZED)


def options_for(op: Op) -> dict[str, int | bool]:
    """Options of XLA's compiler.

    An interpreted kernel is a large program that runs for milliseconds, and an oracle only has to be right. Without
    LLVM's optimizations, which are not those of a GPU's compiler anyway, they compile in half the time.
    """
    interpreted = isinstance(op, partial) and op.keywords.get("interpret")
    oracle = not isinstance(op, partial) and op.__module__.endswith(".reference")
    return UNOPTIMIZED if interpreted or oracle else OPTIMIZED
