"""Every verification rule with every sampling parameter: what ``jaxinfer verify-spec`` runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.check import simulate
from jaxinfer.speculative.check.enumerate import (
    CHAIN,
    TREE,
    Law,
    law_by_held_drafts,
    law_by_matching,
    law_by_rejection,
)
from jaxinfer.speculative.check.operations import Operations
from jaxinfer.speculative.check.target import SETTINGS, Target, random_target

EXACT_VOCAB, SAMPLED_VOCAB = 4, 16
TOLERANCE = 1e-6
"""Largest difference of two probabilities that counts as equal; the sampler computes in float32."""

SIGNIFICANT = 1e-3
"""P-value of a whole setting below which laws differ; it is shared between its tests."""

DRAFT = SamplingParams(temperature=1.4, top_k=3)
"""How drafts are drawn from the draft's logits; other parameters than any target's."""

RULES: Mapping[str, tuple[Law, tuple[int, ...]]] = MappingProxyType(
    {
        "matching, chain": (law_by_matching, CHAIN),
        "matching by kernel, chain": (law_by_held_drafts, CHAIN),
        "matching by kernel, tree": (law_by_held_drafts, TREE),
        "rejection, chain": (law_by_rejection, CHAIN),
        "rejection, tree": (law_by_rejection, TREE),
    }
)
"""Rules whose law is enumerated; the first is the engine's."""

Sampler = Callable[..., np.ndarray]
SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "matching, chain": simulate.sample_by_matching,
        "rejection, chain": lambda ops, *rest: simulate.sample_by_rejection(ops, simulate.CHAIN, *rest),
        "rejection, tree": lambda ops, *rest: simulate.sample_by_rejection(ops, simulate.TREE, *rest),
    }
)
SAMPLED_SETTINGS = ("all",)


@dataclass(frozen=True)
class Finding:
    """One cell of the matrix.

    Attributes:
        rule, drafts, setting: what was checked.
        difference: largest difference of two probabilities of the joint law of three tokens; by position in
            ``by_position``. None if it was sampled.
        p_value: smallest p-value times the number of tests. None if the law was enumerated.
        wrong, tokens: tokens of an engine that are not those of the law and the request's random numbers, and all of
            them. None if there was no engine.
    """

    rule: str
    drafts: str
    setting: str
    difference: float | None = None
    by_position: tuple[float, ...] = ()
    p_value: float | None = None
    wrong: int | None = None
    tokens: int = 0

    @property
    def measure(self) -> str:
        """What was found, in words."""
        if self.difference is not None:
            return f"{self.difference:.1e} off"
        if self.wrong is not None:
            return f"{self.wrong} of {self.tokens}"
        return f"p = {self.p_value:.3g}"

    @property
    def holds(self) -> bool:
        if self.difference is not None:
            return self.difference <= TOLERANCE
        if self.wrong is not None:
            return self.wrong == 0
        assert self.p_value is not None
        return self.p_value >= SIGNIFICANT


Check = Callable[[], Finding]


def exact_checks(seed: int = 0) -> Iterator[Check]:
    """Enumerated laws, one cell at a time."""
    ops, draft = Operations(), random_target(EXACT_VOCAB, DRAFT, seed + 1)
    for name, params in SETTINGS.items():
        # Its laws are computed once for all rules.
        target = random_target(EXACT_VOCAB, params, seed)
        for rule in RULES:
            for sampled in (True, False):
                yield partial(_compared, rule, name, target, draft, sampled, ops)


def sampled_checks(samples: int = 20_000, seed: int = 0) -> Iterator[Check]:
    """Laws of a larger vocabulary, sampled.

    Args:
        samples: sequences of each cell; 0: there are no cells.
    """
    for name in SAMPLED_SETTINGS if samples else ():
        for rule in SAMPLERS:
            yield partial(sampled_cell, rule, name, SETTINGS[name], samples, seed, Operations())


def enumerated(
    rule: str, name: str, params: SamplingParams, sampled: bool, seed: int, ops: Operations
) -> Finding:
    """Compares the law that a rule emits with the target's, exactly."""
    target = random_target(EXACT_VOCAB, params, seed)
    draft = random_target(EXACT_VOCAB, DRAFT, seed + 1)
    return _compared(rule, name, target, draft, sampled, ops)


def _compared(rule: str, name: str, target: Target, draft: Target, sampled: bool, ops: Operations) -> Finding:
    law_of, parents = RULES[rule]
    off_VVV = law_of(ops, parents, target, draft, sampled) - target.joint(3)
    by_position = [np.abs(off_VVV.sum(axes)).max() for axes in ((1, 2), (0, 2), (0, 1))]
    return Finding(
        rule,
        "random" if sampled else "likeliest",
        name,
        difference=float(np.abs(off_VVV).max()),
        by_position=tuple(float(x) for x in by_position),
    )


def sampled_cell(
    rule: str, name: str, params: SamplingParams, samples: int, seed: int, ops: Operations
) -> Finding:
    """Compares samples with the target's law by chi-square tests."""
    target = random_target(SAMPLED_VOCAB, params, seed)
    draft = random_target(SAMPLED_VOCAB, DRAFT, seed + 1)
    values = simulate.p_values(SAMPLERS[rule](ops, target, draft, samples, seed), target)
    return Finding(rule, "random", name, p_value=min(1.0, min(values) * len(values)))
