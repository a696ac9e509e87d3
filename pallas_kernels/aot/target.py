"""GPUs as compilation targets on a machine that has none."""

from typing import Any

from jax.experimental import topologies

from pallas_kernels.gpus import Gpu

_DRIVER = "13.0.0"
"""Without versions of driver and runtime XLA makes no command buffers."""


def target_config(gpu: Gpu) -> str:
    """XLA's description of a GPU: a ``GpuTargetConfigProto`` as text.

    XLA's repository has such files for some cards (``xla/backends/gpu/target_config/specs``); the fields are the same.
    """
    major, minor = gpu.compute_capability
    # wgmma exists in sm_90a only, not in sm_90.
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads_per_sm}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  shared_memory_per_core: {gpu.shared_memory_per_sm}
  core_count: {gpu.sms} fpus_per_core: {gpu.fpus_per_sm} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {gpu.memory_bandwidth:.0f} l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "{_DRIVER}" runtime_version: "{_DRIVER}" compile_time_toolkit_version: "{_DRIVER}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{gpu.device_kind}"
"""


def devices(gpu: Gpu, count: int = 1) -> list[Any]:
    """``count`` devices of one host that can be compiled for, and nothing else."""
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=target_config(gpu), topology=f"1x1x{count}"
    )
    return list(topology.devices)
