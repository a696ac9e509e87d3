"""What sampling has to yield: the processed law of a small model, in float64 and apart from the sampler."""

from bisect import bisect_right
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.sampling_params import SamplingParams

PROMPT = (0,)
"""Tokens before the first one that is sampled."""

SETTINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "greedy": SamplingParams(temperature=0.0),
        "temperature": SamplingParams(temperature=0.7),
        "top-k": SamplingParams(top_k=3),
        "top-p": SamplingParams(top_p=0.8),
        "min-p": SamplingParams(min_p=0.2),
        "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5),
        "bias": SamplingParams(logit_bias={0: 0.8, 2: -1.0}),
        "all": SamplingParams(
            temperature=1.2,
            top_k=3,
            top_p=0.95,
            min_p=0.02,
            frequency_penalty=0.6,
            repetition_penalty=1.2,
            logit_bias={1: 0.7},
        ),
    }
)
"""Sampling parameters that are checked, by name."""


class Target:
    """A model that looks at its newest token only, sampled with some parameters.

    Args:
        logits_VV: row a is what it says after token a.
    """

    def __init__(self, logits_VV: np.ndarray, params: SamplingParams) -> None:
        self.logits_VV = logits_VV.astype(np.float32)
        self.params = params
        self._laws: dict[tuple[int, ...], np.ndarray] = {}
        self._ends: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float] | None] = {}

    @property
    def vocab(self) -> int:
        return len(self.logits_VV)

    def law(self, outputs: tuple[int, ...]) -> np.ndarray:
        """Probabilities [V] of the token behind the given ones."""
        if outputs not in self._laws:
            logits_V = self.logits_VV[(*PROMPT, *outputs)[-1]].astype(np.float64)
            self._laws[outputs] = _truncated(_edited(logits_V, self.params, outputs), self.params)
        return self._laws[outputs]

    def draw(self, outputs: tuple[int, ...], uniform: float) -> int:
        """The token behind the given ones whose interval holds the number."""
        ends = self.ends(outputs)
        assert ends is not None
        return bisect_right(ends, uniform)

    def ends(self, outputs: tuple[int, ...], without: tuple[int, ...] = ()) -> list[float] | None:
        """Ends of the intervals of the tokens behind the given ones, see ``interval_ends``.

        Args:
            without: tokens that are left out; None if no other is possible.
        """
        key = outputs, without
        if key not in self._ends:
            law_V = self.law(outputs).copy()
            law_V[list(without)] = 0
            self._ends[key] = interval_ends(law_V / law_V.sum()) if law_V.any() else None
        return self._ends[key]

    def joint(self, length: int) -> np.ndarray:
        """Probabilities of the first tokens, [V] * length."""
        law: np.ndarray = np.ones(())
        for count in range(length):
            shape = (self.vocab,) * count
            behind = np.stack([self.law(outputs) for outputs in np.ndindex(shape)])
            law = law[..., None] * behind.reshape(*shape, self.vocab)
        return law


def interval_ends(law_V: np.ndarray) -> list[float]:
    """Cumulative probabilities; 2 from the last possible token on, so that no rounding leads behind it."""
    ends_V = np.cumsum(law_V)
    ends_V[np.flatnonzero(law_V)[-1] :] = 2.0
    return ends_V.tolist()


def random_target(vocab: int, params: SamplingParams, seed: int) -> Target:
    return Target(np.random.default_rng(seed).normal(size=(vocab, vocab)), params)


def _edited(logits_V: np.ndarray, params: SamplingParams, outputs: tuple[int, ...]) -> np.ndarray:
    logits_V = logits_V.copy()
    for token, value in (params.logit_bias or {}).items():
        logits_V[token] += value
    count_V = np.bincount(np.array(outputs, int), minlength=len(logits_V))
    seen_V = count_V > 0
    seen_V[list(PROMPT)] = True
    factor = params.repetition_penalty
    logits_V[seen_V] = np.where(logits_V > 0, logits_V / factor, logits_V * factor)[seen_V]
    return logits_V - params.frequency_penalty * count_V - params.presence_penalty * (count_V > 0)


def _truncated(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    if params.greedy:
        return np.eye(len(logits_V))[logits_V.argmax()]
    weight_V = np.exp((logits_V - logits_V.max()) / params.temperature)
    kept_V = np.ones(len(logits_V), bool)
    if params.top_k:
        kept_V &= logits_V >= np.sort(logits_V)[-params.top_k]
    mass_V = np.cumsum(np.sort(weight_V * kept_V)[::-1])
    if params.top_p < 1:
        last = int(np.argmax(mass_V >= params.top_p * mass_V[-1]))
        kept_V &= weight_V >= np.sort(weight_V)[::-1][last]
    kept_V &= weight_V >= params.min_p
    return weight_V * kept_V / (weight_V * kept_V).sum()
