"""Compiles the C++ sources of ``src/`` to one shared library. Standard library only: ``setup.py`` imports this.

``src/NAME.cc`` is compiled once, for any x86-64 processor. ``src/NAME_simd.cc`` is compiled once per entry of
``SIMD_LEVELS``, with the macro ``SIMD_NAMESPACE`` set to the name of the level; ``src/cpu.h`` chooses between them when
the library is loaded. A SIMD source must not instantiate inline functions of the standard library: the linker keeps one
copy of those, which may hold instructions that the processor lacks.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "src"
SIMD_LEVELS = {
    "v3": ("-march=x86-64-v3",),
    "v4": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512"),
}
COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-ffp-contract=fast",
)
OPTIMIZED = ("-O3", "-g1")


FfiVersion = tuple[int, int]
"""Major and minor version of XLA's FFI."""


class CompileError(RuntimeError):
    """The library could not be built; the message says why."""


def find_compiler() -> list[str]:
    """The C++ compiler as an argument list: ``$CXX``, else the first of ``c++``, ``g++``, ``clang++``.

    Raises:
        CompileError: another platform than Linux on x86-64, or no compiler.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CompileError(f"only Linux on x86-64 is supported, not {platform.system()} {platform.machine()}")
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CompileError("no C++ compiler (c++, g++ or clang++) was found")


def ffi_version(include_dir: Path) -> FfiVersion:
    """The version of XLA's FFI that the headers in a directory describe."""
    header = (include_dir / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def library_name(version: FfiVersion) -> str:
    """Name of the library for an FFI. XLA refuses handlers of a newer FFI than its own, and then all of its CPU
    backend fails: environments with different versions that share a source tree have libraries of their own."""
    return f"libjaxinfer_cpu-ffi{version[0]}.{version[1]}.so"


def newest_library(directory: Path, version: FfiVersion) -> Path | None:
    """The library in a directory that an XLA of this version takes; None if there is none."""
    major, newest = version
    names = (directory / library_name((major, minor)) for minor in range(newest, -1, -1))
    return next((path for path in names if path.exists()), None)


def compile_library(
    out: Path,
    include_dir: Path,
    flags: tuple[str, ...] = OPTIMIZED,
    *,
    program: Path | None = None,
    plain_levels: tuple[str, ...] = (),
) -> None:
    """Builds ``out`` from every ``src/*.cc``.

    Args:
        include_dir: of XLA's FFI headers, ``jax.ffi.include_dir()``.
        flags: optimization and instrumentation, for compiler and linker.
        program: a source with ``main``; ``out`` becomes a program instead of a library.
        plain_levels: SIMD levels that are compiled without ``flags``: those that this processor does not run.

    Raises:
        CompileError: as ``find_compiler``, or a command failed.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        commands, objects = [], []
        for source in [*sorted(SOURCE_DIR.glob("*.cc")), *([program] if program else [])]:
            for level, level_flags in _levels(source):
                target = str(Path(folder) / f"{source.stem}.{level}.o")
                objects.append(target)
                include = ("-I", str(SOURCE_DIR), "-isystem", str(include_dir))
                commands.append(
                    [
                        *compiler,
                        *COMMON_FLAGS,
                        *flags,
                        *level_flags,
                        *include,
                        "-c",
                        str(source),
                        "-o",
                        target,
                    ]
                )
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        # Linked beside the result and renamed: a process that has the old library open keeps it.
        linked = out.with_name(f".{out.name}.{os.getpid()}")
        kind = ("-pthread",) if program else ("-shared", "-Wl,-z,defs,-Bsymbolic")
        _run([*compiler, *flags, *kind, *objects, "-o", str(linked)])
        linked.replace(out)


def _levels(source: Path) -> list[tuple[str, tuple[str, ...]]]:
    if not source.stem.endswith("_simd"):
        return [("any", ())]
    return [(name, (*flags, f"-DSIMD_NAMESPACE={name}")) for name, flags in SIMD_LEVELS.items()]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise CompileError(f"failed: {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
