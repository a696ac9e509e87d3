"""What tests look for in the text of a compiled program."""

import re

import jax

from tests.support.compiling import OPTIMIZED

# Instructions that name an existing buffer again, or hand it through.
FREE = ("parameter", "bitcast", "get-tuple-element", "while", "tuple")


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """XLA's program as it is by default, but for LLVM's optimizations, which touch neither its text nor its buffers."""
    return lowered.compile({**OPTIMIZED, "xla_backend_optimization_level": 0})


def makers(hlo: str, leading: tuple[int, ...]) -> list[str]:
    """Instructions outside fusions whose result has a leading size in ``leading`` and is a new array.

    Inside a fusion only the elements that its root needs are computed, so its instructions do not count; the
    fusion itself does. Updates in place (``dynamic-update-slice`` fusions, scatters) count too: callers filter them.
    """
    size = re.compile(rf"= \w+\[({'|'.join(map(str, leading))})[,\]]\S* ([\w-]+)\(")
    found = []
    fused = False
    for line in hlo.splitlines():
        if line.endswith("{"):
            fused = "fused_computation" in line or line.startswith(("%wrapped_", "wrapped_"))
        match = size.search(line)
        if match and not fused and match.group(2) not in FREE:
            found.append(line.strip())
    return found
