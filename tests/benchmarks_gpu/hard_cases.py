"""Kernel cases of which some go wrong in the ways that a device has for it."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from benchmarks.gpu import smoke_cases
from pallas_kernels.kernel_case import KernelCase


def all_cases() -> tuple[KernelCase, ...]:
    """A good one, one with wrong numbers, one that does not compile, one that ends its process, one that hangs."""
    good = smoke_cases.all_cases()[0]

    def build(act: Callable[[], None]) -> Callable[..., Any]:
        def function(x: jax.Array) -> jax.Array:
            act()
            return x * 2

        return lambda generation, choice: function

    def raises() -> None:
        raise ValueError("tiles do not fit")

    return (
        replace(good, name="wrong", oracle=lambda x: x * 3),
        replace(good, name="raises", build=build(raises)),
        replace(good, name="aborts", build=build(os.abort)),
        replace(good, name="hangs", build=build(lambda: time.sleep(1000))),
        replace(good, name="good"),
    )
