"""The compiled library: whether it can be used, and its functions as FFI targets."""

import ctypes
import functools
from pathlib import Path

import jax

from pallas_kernels.native.compile import ffi_version, newest_library

DIRECTORY = Path(__file__).parent
TARGETS = (
    "jaxinfer_probe",
    "jaxinfer_linear",
    "jaxinfer_linear_rows",
    "jaxinfer_attention",
    "jaxinfer_rope_kv_write",
    "jaxinfer_rms_norm",
    "jaxinfer_gate",
)
"""Handlers of the library, registered under their own names."""


def available() -> tuple[bool, str]:
    """Whether the library is built, loads, and has instructions that this processor runs; if not, why."""
    return _load()


def require() -> None:
    """For the ops, before they call a target.

    Raises:
        RuntimeError: the library cannot be used.
    """
    ok, reason = available()
    if not ok:
        raise RuntimeError(reason)


def cpu_level() -> int:
    """The compiled variant that this processor runs: 3 or 4, see ``compile.SIMD_LEVELS``; the library is available."""
    level: int = ctypes.CDLL(str(_path())).jaxinfer_cpu_level()
    return level


def _path() -> Path | None:
    return newest_library(DIRECTORY, ffi_version(Path(jax.ffi.include_dir())))


@functools.cache
def _load() -> tuple[bool, str]:
    """Loads the library and registers its targets, once per process."""
    path = _path()
    if path is None:
        return False, "the native library was not built when the package was installed (no C++ compiler?)"
    try:
        library = ctypes.CDLL(str(path))
        if library.jaxinfer_cpu_level() == 0:
            return False, "this processor has no AVX2, FMA and F16C"
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
    except (OSError, AttributeError) as error:
        return False, f"the native library does not load: {error}"
    except (RuntimeError, ValueError) as error:
        return False, f"this version of XLA refuses the native library: {error}"
    return True, ""
