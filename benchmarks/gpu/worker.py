"""The process that measures one part: ``python -m benchmarks.gpu.worker SETTINGS``; ``run.py`` starts it."""

import importlib
import os
import sys
import time
from typing import Any

from benchmarks.gpu import records, stand_ins
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.supervise import UNUSABLE

MODULES = {
    "ceilings": "ceilings",
    "kernels": "kernels",
    "more-kernels": "kernels",
    "steps": "steps",
    "throughput": "throughput",
    "tuning": "tuning",
}


def main() -> int:
    settings = Settings.from_json(sys.argv[1])
    # Before JAX is imported: it reads them once.
    os.environ["JAX_PLATFORMS"] = settings.platform
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if settings.smoke:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
    recorder = Recorder(settings.records)
    stand_ins.hide(settings.hide)
    if settings.part in ("steps", "throughput"):
        for package, effect in stand_ins.install().items():
            recorder.missing(package, effect)

    import jax

    from benchmarks.gpu.context import Context, DeviceUnusableError
    from benchmarks.gpu.limits import Ceilings
    from pallas_kernels.gpus import GPUS, generation_of

    if settings.cache_directory is not None:
        jax.config.update("jax_compilation_cache_dir", settings.cache_directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    results = records.read(settings.records)
    device = jax.devices()[0]
    gpu = next((gpu for gpu in GPUS.values() if gpu.device_kind == device.device_kind), None)
    if "device" not in results.facts:
        name = device.device_kind if gpu is None else gpu.name
        recorder.fact("device", {"gpu": name, **device_facts(device)})
    capability = getattr(device, "compute_capability", None)  # a CPU has none
    context = Context(
        settings=settings,
        recorder=recorder,
        generation=(generation_of(capability) if capability else None) or "hopper",
        ceilings=Ceilings.of(results.ok("ceilings"), gpu),
        started=results.facts.get("started", time.time()),
    )
    part = importlib.import_module(f"benchmarks.gpu.{MODULES[settings.part]}")
    try:
        part.run(context)
    except DeviceUnusableError:
        return UNUSABLE
    return 0


def device_facts(device: Any) -> dict[str, Any]:
    """What the results should be read with."""
    import jax
    import jaxlib

    stats = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "memory_bytes": stats.get("bytes_limit"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


if __name__ == "__main__":
    # Threads that still compile must not hold the process up when its part is done.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
