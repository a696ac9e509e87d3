"""Builds the native CPU library beside its sources' package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from pallas_kernels.native.compile import (  # noqa: E402
    CompileError,
    compile_library,
    ffi_version,
    library_name,
)


def headers() -> Path:
    """XLA's FFI headers; ImportError without jaxlib."""
    import jaxlib

    return Path(jaxlib.__file__).parent / "include"


class BuildLibrary(build_ext):
    """Compiles without distutils, which knows no per-file flags. A failure leaves the package without the library."""

    def get_ext_filename(self, fullname: str) -> str:
        try:
            version = ffi_version(headers())
        except ImportError:
            version = (0, 0)  # nothing will be built
        return str(Path(*fullname.split(".")[:-1]) / library_name(version))

    def build_extension(self, ext: Extension) -> None:
        try:
            out = Path(self.get_ext_fullpath(ext.name))
            out.parent.mkdir(parents=True, exist_ok=True)
            compile_library(out, headers())
        except (CompileError, ImportError) as error:
            self.warn(f"the native CPU library is not built; XLA's own products are used. Reason: {error}")


setup(
    # Optional: without the file (no compiler) an install goes on.
    ext_modules=[Extension("pallas_kernels.native.library_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibrary},
)
