"""From a configuration to a drafter."""

import importlib.util
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from jaxinfer.config import ConfigError, SpeculativeConfig
from jaxinfer.speculative.drafter import Drafter
from jaxinfer.speculative.ngram import NgramDrafter
from jaxinfer.speculative.speculation import Speculation

ENTRY_POINTS = "jaxinfer.drafters"
"""Group of entry points by which installed packages offer drafters, by name."""

DrafterFactory = Callable[[SpeculativeConfig], Drafter]


def make_speculation(config: SpeculativeConfig) -> Speculation | None:
    """What gives drafts to running sequences; None without speculation.

    Raises:
        ConfigError: the drafter cannot be found.
    """
    factory = find_drafter(config.drafter)
    return None if factory is None else Speculation(factory(config), *config.draft_limits)


def find_drafter(name: str) -> DrafterFactory | None:
    """What makes the drafter of a name; None for "none".

    Raises:
        ConfigError: there is no such drafter.
    """
    if name == "none":
        return None
    if name == "ngram":
        return _ngram
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        return _from_file(Path(path), attribute)
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        names = ", ".join(["none", "ngram", *sorted(offered)])
        raise ConfigError(f"speculative.drafter is {name!r}; allowed: {names}, or path.py:Class")
    return offered[name].load()


def _ngram(config: SpeculativeConfig) -> Drafter:
    return NgramDrafter(config.ngram_longest, config.ngram_shortest)


def _from_file(path: Path, attribute: str) -> DrafterFactory:
    """A class or function in a Python file, which is run."""
    if not path.is_file():
        raise ConfigError(f"speculative.drafter: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if attribute not in vars(module):
        raise ConfigError(f"speculative.drafter: {path} defines no {attribute}")
    return vars(module)[attribute]
