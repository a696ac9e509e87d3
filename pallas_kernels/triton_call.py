"""The one way in which kernels here call Pallas-Triton."""

import warnings
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    name: str,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    input_output_aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """``pl.pallas_call`` on whole arrays: kernels address them through ``.at[...]`` with index arrays of their own.

    Args:
        kernel: takes a reference per input, then one per output.
        num_warps: a power of two; others make the compiler abort the process.
        interpret: run in XLA on any device, for tests.
        input_output_aliases: inputs that are updated in place, by output.
    """
    assert num_warps & (num_warps - 1) == 0
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        name=name,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        input_output_aliases=input_output_aliases or {},
    )

    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Triton.*deprecated.*")
            return call(*args)

    return run
