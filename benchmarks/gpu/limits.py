"""Against what a device's results are held: its measured limits, or published ones where none were measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pallas_kernels.gpus import Gpu
from pallas_kernels.kernel_case import Work

_UNKNOWN_BANDWIDTH, _UNKNOWN_TFLOPS = 2.0e10, 0.1


@dataclass(frozen=True)
class Ceilings:
    """Limits of a device.

    Attributes:
        bandwidth: bytes per second of a large copy, read and written ones.
        tflops: 10^12 operations per second of a large matrix product by operand type.
        launch: seconds that a kernel takes which does nothing.
        l2_bytes: size of the last cache.
    """

    bandwidth: float
    tflops: Mapping[str, float]
    launch: float
    l2_bytes: int

    @classmethod
    def of(cls, measured: Mapping[str, Mapping[str, Any]], gpu: Gpu | None) -> Self:
        """Args:
        measured: values of the cases of the part "ceilings" by name.
        gpu: published values; None if the device is not known.
        """
        tflops = dict(gpu.tflops) if gpu else {}
        for name, values in measured.items():
            if name.startswith("matmul-"):
                tflops[name.removeprefix("matmul-")] = values["tflops"]
        published = gpu.memory_bandwidth if gpu else _UNKNOWN_BANDWIDTH
        return cls(
            bandwidth=measured["copy"]["bytes_per_second"] if "copy" in measured else published,
            tflops=tflops,
            launch=measured["launch"]["seconds"] if "launch" in measured else 3e-6,
            l2_bytes=gpu.l2_bytes if gpu else 32 << 20,
        )

    def floor(self, work: Work) -> tuple[float, str]:
        """The least seconds that the work takes, and what bounds it: "bytes" or "flops"."""
        flops = work.flops / (1e12 * self.tflops.get(work.dtype, _UNKNOWN_TFLOPS))
        moved = work.bytes / self.bandwidth
        return (moved, "bytes") if moved >= flops else (flops, "flops")
