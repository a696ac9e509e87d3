"""Numbers that a plan depends on and that nobody measured for it. Each has a source, which is printed with the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Assumptions:
    """See ``SOURCES`` for what each is, its unit, and where it comes from."""

    memory_efficiency: float = 0.85
    compute_efficiency: float = 0.65
    attention_efficiency: float = 0.45
    link_efficiency: float = 0.8
    link_latency: float = 10e-6
    network_bandwidth: float = 50e9
    network_latency: float = 30e-6
    node_size: float = 8
    kernels_per_layer: float = 16
    kernel_gap: float = 1e-6
    host_per_step: float = 0.15e-3
    host_per_sequence: float = 15e-6
    cache_occupancy: float = 0.9
    expert_imbalance: float = 1.2
    exchange_overlap: float = 0.5
    longest_output: float = 4.0


SOURCES: Mapping[str, str] = {
    "memory_efficiency": "share of the data sheet's memory bandwidth; FlashMLA reads 3000 of 3350 GB/s on H800 (its "
    "README), a step also has short kernels",
    "compute_efficiency": "share of the dense tensor-core peak of products; FlashMLA 660 of 989 TFLOP/s, DeepGEMM "
    "up to 1550 of 1979 in fp8 on H800 (their READMEs)",
    "attention_efficiency": "share of the bf16 peak of prefill attention; FlashAttention-3 at most 0.75 "
    "(arXiv:2407.08608), less for short prompts",
    "link_efficiency": "share of NVLink's or the network's bandwidth; DeepEP: 153 of 160 GB/s on NVLink and 43-58 of "
    "50 GB/s between nodes (docs/legacy.md), less for small messages",
    "link_latency": "seconds of a collective within a node beside its bytes; a guess",
    "network_bandwidth": "bytes/s of each GPU between nodes: one 400 Gb/s port per GPU (DGX H100 and H200 data sheets)",
    "network_latency": "seconds of a collective between nodes beside its bytes; a guess, DeepEP's low-latency kernels "
    "take 77-190 microseconds with their bytes (docs/legacy.md)",
    "node_size": "GPUs that NVLink connects (HGX boards)",
    "kernels_per_layer": "docs/kernels.md: kernels of a decode step compiled for H200, per layer",
    "kernel_gap": "seconds between kernels of a CUDA graph; a guess",
    "host_per_step": "seconds of the host per step, docs/performance.md (host time), measured on a slow processor; the "
    "next step is planned meanwhile, so it counts only where it exceeds the device's time",
    "host_per_sequence": "seconds of the host per running sequence and step; the same measurement",
    "cache_occupancy": "share of the KV cache that running sequences can fill, as their lengths differ; a guess",
    "expert_imbalance": "load of the busiest device over the mean, with experts on several devices; a guess",
    "exchange_overlap": "share of an all-to-all that is hidden behind computation (two batches in turns, DeepSeek-V3 "
    "report, section 3.4); a guess",
    "longest_output": "static batching: outputs are exponential, cut at so many times their mean; a guess",
}


def assume(changes: Mapping[str, float]) -> Assumptions:
    """The assumptions with some of them changed.

    Raises:
        ValueError: an unknown name, or a value that is not positive.
    """
    names = [field.name for field in fields(Assumptions)]
    for name, value in changes.items():
        if name not in names:
            raise ValueError(f"unknown assumption {name!r}; allowed: {', '.join(names)}")
        if not value > 0 and name != "exchange_overlap":
            raise ValueError(f"assumption {name} is {value}, but must be positive")
    return replace(Assumptions(), **changes)
