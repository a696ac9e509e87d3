"""Published limits of NVIDIA GPUs: what roofline estimates and ahead-of-time compilation need to know of a card.

Sources: NVIDIA's data sheets of the A100 (SXM 80 GB), L4, H100 (SXM), H200 and DGX B200, and the CUDA C programming
guide's table of compute capabilities. Throughputs are dense.
"""

from dataclasses import dataclass
from typing import Literal

Generation = Literal["ampere", "ada", "hopper", "blackwell"]


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        device_kind: what ``jax.Device.device_kind`` says.
        compute_capability: major, minor.
        sms: streaming multiprocessors.
        fpus_per_sm: float32 lanes of one of them.
        clock_ghz: boost clock.
        shared_memory_per_block, shared_memory_per_sm: bytes, opt-in limit.
        threads_per_sm: most resident threads.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second that a card can send to the others of its node, and receive at the same time:
            half of what data sheets call the bandwidth of NVLink, or of PCI Express.
        l2_bytes, memory_bytes: sizes.
        tflops: dense 10^12 operations per second by operand type; a type that is absent has no tensor-core path.
    """

    name: str
    device_kind: str
    generation: Generation
    compute_capability: tuple[int, int]
    sms: int
    fpus_per_sm: int
    clock_ghz: float
    shared_memory_per_block: int
    shared_memory_per_sm: int
    threads_per_sm: int
    memory_bandwidth: float
    link_bandwidth: float
    l2_bytes: int
    memory_bytes: int
    tflops: dict[str, float]


_MIB, _GIB = 1 << 20, 1 << 30
_HOPPER_TFLOPS = {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0, "int8": 1979.0, "tf32": 494.0, "fp32": 67.0}

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            generation="ampere",
            compute_capability=(8, 0),
            sms=108,
            fpus_per_sm=64,
            clock_ghz=1.41,
            shared_memory_per_block=166_912,
            shared_memory_per_sm=167_936,
            threads_per_sm=2048,
            memory_bandwidth=2.039e12,
            link_bandwidth=3.0e11,
            l2_bytes=40 * _MIB,
            memory_bytes=79 * _GIB,
            tflops={"bf16": 312.0, "fp16": 312.0, "int8": 624.0, "tf32": 156.0, "fp32": 19.5},
        ),
        Gpu(
            name="l4",
            device_kind="NVIDIA L4",
            generation="ada",
            compute_capability=(8, 9),
            sms=58,
            fpus_per_sm=128,
            clock_ghz=2.04,
            shared_memory_per_block=101_376,
            shared_memory_per_sm=102_400,
            threads_per_sm=1536,
            memory_bandwidth=3.0e11,
            link_bandwidth=3.2e10,
            l2_bytes=48 * _MIB,
            memory_bytes=22 * _GIB,
            tflops={"bf16": 121.0, "fp16": 121.0, "fp8": 242.0, "int8": 242.0, "tf32": 60.0, "fp32": 30.3},
        ),
        Gpu(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            generation="hopper",
            compute_capability=(9, 0),
            sms=132,
            fpus_per_sm=128,
            clock_ghz=1.98,
            shared_memory_per_block=232_448,
            shared_memory_per_sm=233_472,
            threads_per_sm=2048,
            memory_bandwidth=3.352e12,
            link_bandwidth=4.5e11,
            l2_bytes=50 * _MIB,
            memory_bytes=79 * _GIB,
            tflops=_HOPPER_TFLOPS,
        ),
        Gpu(
            name="h200",
            device_kind="NVIDIA H200",
            generation="hopper",
            compute_capability=(9, 0),
            sms=132,
            fpus_per_sm=128,
            clock_ghz=1.98,
            shared_memory_per_block=232_448,
            shared_memory_per_sm=233_472,
            threads_per_sm=2048,
            memory_bandwidth=4.8e12,
            link_bandwidth=4.5e11,
            l2_bytes=50 * _MIB,
            memory_bytes=140 * _GIB,
            tflops=_HOPPER_TFLOPS,
        ),
    )
}


CARDS = {
    **GPUS,
    "b200": Gpu(
        name="b200",
        device_kind="NVIDIA B200",
        generation="blackwell",
        compute_capability=(10, 0),
        sms=148,
        fpus_per_sm=128,
        clock_ghz=1.965,
        shared_memory_per_block=232_448,
        shared_memory_per_sm=233_472,
        threads_per_sm=2048,
        memory_bandwidth=8.0e12,
        link_bandwidth=9.0e11,
        l2_bytes=126 * _MIB,
        memory_bytes=178 * _GIB,
        tflops={"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "int8": 4500.0, "tf32": 1125.0, "fp32": 75.0},
    ),
}
"""``GPUS``, for which kernels are compiled, and cards that are known to planning only."""


def generation_of(compute_capability: str) -> Generation | None:
    """The generation of a device of compute capability "major.minor"; None before Ampere."""
    major, minor = (int(part) for part in compute_capability.split("."))
    if (major, minor) == (8, 9):
        return "ada"
    names: dict[int, Generation] = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
    return names.get(major)
