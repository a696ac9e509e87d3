"""How many blocks of a kernel an SM holds at once.

Rules and granularities of the CUDA occupancy calculator for compute capability 8.0 to 9.0: a quarter of the registers
belongs to each of four schedulers, warps get them in units of 256, and a block costs 1 KiB of shared memory more.
"""

from pallas_kernels.gpus import Gpu

_REGISTERS_PER_SCHEDULER = 16_384
_SCHEDULERS = 4
_REGISTER_UNIT = 256
_SHARED_RESERVED, _SHARED_UNIT = 1024, 128
_BLOCKS_PER_SM = {(8, 0): 32, (8, 9): 24, (9, 0): 32}


def blocks_per_sm(gpu: Gpu, *, registers: int, shared_bytes: int, threads: int) -> int:
    """Resident blocks.

    Args:
        registers: per thread.
        shared_bytes: per block.
        threads: per block.
    """
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS_PER_SCHEDULER // per_warp * _SCHEDULERS // warps
    shared = -(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + _SHARED_RESERVED
    by_shared = gpu.shared_memory_per_sm // shared
    by_threads = gpu.threads_per_sm // (warps * 32)
    return min(by_registers, by_shared, by_threads, _BLOCKS_PER_SM[gpu.compute_capability])
