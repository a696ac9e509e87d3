"""Options of XLA's compiler in tests."""

from importlib.metadata import version

# XLA's newer emitters for the CPU, which go through MLIR, take almost three times as long to compile the sampler as the
# older ones, which jaxlib 0.11 no longer has.
_OLD_EMITTERS = tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11)


def _options(level: int, new_emitters: bool) -> dict[str, int | bool]:
    emitters = {"xla_cpu_use_fusion_emitters": new_emitters} if _OLD_EMITTERS else {}
    return {"xla_backend_optimization_level": level, **emitters}


UNOPTIMIZED = _options(0, new_emitters=False)
"""Compiles quickly, without LLVM's optimizations."""
OPTIMIZED = _options(3, new_emitters=True)
"""What programs get by default, whatever XLA_FLAGS say."""


def as_flags(options: dict[str, int | bool]) -> str:
    """For XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
