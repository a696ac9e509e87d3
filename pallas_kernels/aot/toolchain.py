"""What ahead-of-time compilation needs to be installed."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_NO_PTXAS = "ptxas is not on PATH: install a CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-nvvm"


def missing() -> str | None:
    """What to install before kernels can be compiled for GPUs here; None if nothing is missing."""
    return next(_missing(), None)


def _missing() -> Iterator[str]:
    jax_version = importlib.metadata.version("jax")
    found = {name: version for name in PLUGINS if (version := _version(name)) is not None}
    if not found:
        yield (
            f"JAX's CUDA plugin is not installed: pip install jax-cuda13-plugin=={jax_version} "
            "(the extra gpu-aot; make test-gpu-aot does it in an environment of its own)"
        )
    if found and jax_version not in found.values():
        name, version = next(iter(found.items()))
        yield (
            f"{name} {version} does not belong to jax {jax_version}: pip install {name}=={jax_version}, "
            f"with its companion {name.removesuffix('plugin')}pjrt"
        )
    if shutil.which("ptxas") is None and _wheel_file("bin/ptxas") is None:
        yield _NO_PTXAS


def ptxas() -> str:
    """Path of the assembler: of the toolkit on PATH, else of the wheel ``nvidia-cuda-nvcc``.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which("ptxas") or _wheel_file("bin/ptxas")
    if found is None:
        raise FileNotFoundError(_NO_PTXAS)
    return str(found)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheel_file(ending: str) -> Path | None:
    """A file that the wheels with the CUDA toolkit's programs installed below ``nvidia``."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return next((path for folder in folders for path in sorted(folder.rglob(ending))), None)
