"""What a compiled case must keep to."""

from collections.abc import Iterator

from pallas_kernels.aot.inspect import ProgramFacts
from pallas_kernels.gpus import Gpu
from pallas_kernels.kernel_case import Limits

_ACCEPTED = {"mma": ("mma.sync", "wgmma", "tcgen05.mma"), "wgmma": ("wgmma",)}
"""Instructions that satisfy an expectation: where "mma" will do, the larger ones do too."""


def problems(limits: Limits, gpu: Gpu, facts: ProgramFacts, donated_bytes: int) -> tuple[str, ...]:
    """What is wrong with a compiled case; empty if nothing is.

    Args:
        donated_bytes: of the arguments that are meant to be updated in place.
    """
    return tuple(_problems(limits, gpu, facts, donated_bytes))


def _problems(limits: Limits, gpu: Gpu, facts: ProgramFacts, donated_bytes: int) -> Iterator[str]:
    if not any(kernel.pallas for kernel in facts.kernels):
        yield "no Pallas kernel in the program"
    for kernel in facts.kernels:
        if kernel.spill_bytes:
            yield f"{kernel.name}: {kernel.spill_bytes} bytes of registers spilled; allowed: 0"
        if kernel.registers > limits.registers:
            yield f"{kernel.name}: {kernel.registers} registers; allowed: {limits.registers}"
        if kernel.shared_bytes > gpu.shared_memory_per_block:
            most = gpu.shared_memory_per_block
            yield f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory; allowed on {gpu.name}: {most}"
    if limits.tensor_core is not None:
        found = {name for kernel in facts.kernels for name in kernel.instructions}
        if not found.intersection(_ACCEPTED[limits.tensor_core]):
            yield f"no {limits.tensor_core} instruction; found: {', '.join(sorted(found)) or 'none'}"
    if limits.temp_bytes is not None and facts.temp_bytes > limits.temp_bytes:
        yield f"{facts.temp_bytes} bytes of temporary buffers; allowed: {limits.temp_bytes}"
    if facts.alias_bytes < donated_bytes:
        yield f"{facts.alias_bytes} of {donated_bytes} donated bytes are updated in place"
