"""From a configuration to a drafter."""

import importlib.util
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.runner.timing import ProgramSeconds
from jaxinfer.sampling.typical import Typical
from jaxinfer.speculative.adaptive import AdaptiveDrafts
from jaxinfer.speculative.costs import StepCosts
from jaxinfer.speculative.drafter import DeviceDrafter, Drafter
from jaxinfer.speculative.ngram import NgramDrafter
from jaxinfer.speculative.speculation import Reserve, Speculation
from jaxinfer.speculative.suffix import SuffixDrafter

logger = logging.getLogger(__name__)

ENTRY_POINTS = "jaxinfer.drafters"
"""Group of entry points by which installed packages offer drafters, by name."""

DrafterFactory = Callable[[SpeculativeConfig], Drafter]


def _ngram(config: SpeculativeConfig) -> Drafter:
    return NgramDrafter(config.ngram_longest, config.ngram_shortest)


def _beside_the_target(config: SpeculativeConfig) -> Drafter:
    raise ConfigError(f"speculative.drafter is {config.drafter!r}, but this runner computes no models")


BUILT_IN: Mapping[str, DrafterFactory] = {
    "ngram": _ngram,
    "suffix": SuffixDrafter,
    "model": _beside_the_target,
    "head": _beside_the_target,
}


def make_speculation(
    config: SpeculativeConfig,
    max_model_len: int,
    programs: ProgramSeconds | None = None,
    overlapped: bool = True,
    *,
    beside: DeviceDrafter | None = None,
    reserve: Reserve | None = None,
) -> Speculation | None:
    """What gives drafts to running sequences; None without speculation.

    Args:
        programs: how long they take, for an adaptive number of drafts; None if that is not wanted.
        overlapped: whether steps without drafts are overlapped.
        beside: a drafter that computes beside the target; absent: the one that the configuration names.
        reserve: see ``Speculation``; for such a drafter.

    Raises:
        ConfigError: the drafter cannot be found, or is a model, which needs an engine's device.
    """
    drafter: Drafter | None = beside
    if drafter is None:
        factory = find_drafter(config.drafter)
        if factory is None:
            return None
        drafter = factory(config)
    adaptive = None
    if programs is not None:
        adaptive = AdaptiveDrafts(StepCosts(programs, overlapped, config.max_drafts), *config.draft_limits)
    evidence = drafter.evidence if isinstance(drafter, NgramDrafter | SuffixDrafter) else None
    return Speculation(
        drafter,
        *config.draft_limits,
        adaptive,
        evidence=evidence,
        reserve=None if beside is None else reserve,
        slots=0 if beside is None else beside.slots,
        trees=config.trees,
        max_model_len=max_model_len,
    )


def typical_of(config: SpeculativeConfig) -> Typical | None:
    """The lossy acceptance of a configuration, which is told in the log; None if it is exact."""
    if config.acceptance == "exact":
        return None
    logger.warning(
        "speculative.acceptance is typical: lossy, sampled requests do not follow the model's law "
        "(epsilon %g, delta %g)",
        config.typical_epsilon,
        config.typical_delta,
    )
    return Typical(config.typical_epsilon, config.typical_delta)


def find_drafter(name: str) -> DrafterFactory | None:
    """What makes the drafter of a name; None for "none".

    Raises:
        ConfigError: there is no such drafter.
    """
    if name == "none":
        return None
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        return _from_file(Path(path), attribute)
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        names = ", ".join(["none", *BUILT_IN, *sorted(offered)])
        raise ConfigError(f"speculative.drafter is {name!r}; allowed: {names}, or path.py:Class")
    return offered[name].load()


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
