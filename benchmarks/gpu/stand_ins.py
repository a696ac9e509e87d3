"""Lets the engine run on an image that has JAX and NumPy only.

The engine's modules import packages that a benchmark on random weights does not need: tokenizers, grammars, file
formats, connections. Where one is absent, an inert module takes its place: it can be imported, and every name in it is
an empty class. Three packages are used, and get a small stand-in each: flax (modules as trees of parameters), pydantic
(configuration), msgspec (a struct). Installed packages are never replaced.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

INERT = ("yaml", "tokenizers", "jinja2", "gguf", "llguidance", "zmq")
IMITATED = ("flax", "pydantic", "msgspec")

_WORKS = "stand-in; the engine runs as with the package, weights and tokens are random anyway"


class _Names(type):
    """A class whose unknown attributes are empty classes as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (), {"__init__": _ignore})
        setattr(cls, name, value)
        return value


def _ignore(self: object, *args: object, **options: object) -> None:
    del self, args, options


class _InertModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (), {"__init__": _ignore})
        setattr(self, name, value)
        return value


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds inert packages, and any module below them."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


class _HidingFinder(importlib.abc.MetaPathFinder):
    """Makes installed packages absent."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.split(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)
        return None


def hide(packages: Iterable[str]) -> None:
    """Treats packages as not installed, in this process; for tests."""
    if packages:
        sys.meta_path.insert(0, _HidingFinder(packages))


def is_missing(package: str) -> bool:
    """Whether a package is not installed, or hidden."""
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


def install() -> dict[str, str]:
    """Puts stand-ins in the place of what is missing.

    Returns:
        What each absence means for the results, by package.
    """
    inert = [package for package in INERT if is_missing(package)]
    imitated = [package for package in IMITATED if is_missing(package)]
    sys.meta_path.insert(0, _InertFinder(inert))
    for package in imitated:
        stand_in = importlib.import_module(f"benchmarks.gpu.absent.{package}_stand_in")
        module = ModuleType(package)
        module.__dict__.update({name: getattr(stand_in, name) for name in stand_in.PROVIDES})
        sys.modules[package] = module
    return dict.fromkeys((*inert, *imitated), _WORKS)
