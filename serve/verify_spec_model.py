"""A real model with and without speculation: the same tokens, and the same law for fresh random numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.engine.inputs import Prompt
from jaxinfer.llm import LLM
from jaxinfer.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.check.matrix import SIGNIFICANT
from jaxinfer.speculative.check.statistics import same_law

Generate = Callable[[Sequence[Prompt], Sequence[SamplingParams]], list[RequestOutput]]

PROMPTS = (
    "Copy this line: one two three four five one two three four five one two three",
    "a b c a b c a b c a b",
    "The colours are red, green, blue, red, green, blue, red, green,",
)
LENGTH = 24
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH),
    "temperature": SamplingParams(temperature=0.7, seed=1, max_tokens=LENGTH),
    "top-p": SamplingParams(top_p=0.9, seed=2, max_tokens=LENGTH),
    "penalties": SamplingParams(temperature=0.0, frequency_penalty=0.4, max_tokens=LENGTH),
    "all": SamplingParams(top_k=20, min_p=0.02, repetition_penalty=1.1, seed=3, max_tokens=LENGTH),
}
SAMPLED_LENGTH = 6

DIFFERENT = 0.2
"""Share of sequences that may get other tokens: steps of other shapes form sums in another order, and tokens that tie
within the last bits are decided by that."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of two engines.

    Attributes:
        differing, sequences: sequences with other tokens, and all of them; or
        p_value: smallest one of all positions, times their number, of samples with different seeds.
    """

    rule: str
    drafts: str
    setting: str
    differing: int = 0
    sequences: int = 0
    p_value: float | None = None

    @property
    def measure(self) -> str:
        if self.p_value is not None:
            return f"p = {self.p_value:.3g}"
        return f"{self.differing} of {self.sequences} differ"

    @property
    def holds(self) -> bool:
        if self.p_value is not None:
            return self.p_value >= SIGNIFICANT
        return self.differing <= DIFFERENT * self.sequences


def compare_engines(config: EngineConfig, sequences: int, seed: int) -> list[Comparison]:
    """Loads the model twice, one after the other; n-gram drafts if the configuration names no drafter."""
    speculative = config.speculative
    if speculative.drafter == "none":
        speculative = speculative.model_copy(update={"drafter": "ngram", "ngram_shortest": 1})
    outputs = []
    for spec in (speculative, SpeculativeConfig()):
        llm = LLM(config.model_copy(update={"speculative": spec}))
        first = seed if spec is speculative else seed + sequences
        outputs.append(run(lambda prompts, params, llm=llm: llm.generate(prompts, params), sequences, first))  # type: ignore[misc]
    with_drafts, without = outputs
    return compare(with_drafts, without, speculative.drafter)


@dataclass(frozen=True)
class Outputs:
    """What an engine gave.

    Attributes:
        tokens: of each prompt, by setting.
        samples: first tokens of many samples of one prompt, [sequences, SAMPLED_LENGTH]; -1 behind an end.
    """

    tokens: dict[str, list[list[int]]]
    samples: np.ndarray


def run(generate: Generate, sequences: int, first_seed: int, prompts: Sequence[Prompt] = PROMPTS) -> Outputs:
    """Lets an engine answer every prompt under every setting, and one of them again and again.

    Args:
        first_seed: of the samples.
    """
    names = [name for name in SETTINGS for _ in prompts]
    answers = generate(list(prompts) * len(SETTINGS), [SETTINGS[name] for name in names])
    tokens: dict[str, list[list[int]]] = {}
    for name, answer in zip(names, answers):
        tokens.setdefault(name, []).append(list(answer.outputs[0].token_ids))
    samples = np.full((sequences, SAMPLED_LENGTH), -1)
    params = [
        SamplingParams(seed=first_seed + i, max_tokens=SAMPLED_LENGTH, top_k=20) for i in range(sequences)
    ]
    for row, answer in zip(samples, generate([prompts[0]] * sequences, params)):
        ids = list(answer.outputs[0].token_ids)
        row[: len(ids)] = ids
    return Outputs(tokens, samples)


def compare(with_drafts: Outputs, without: Outputs, drafter: str) -> list[Comparison]:
    """Tokens one by one, and the law of each position."""
    results = []
    for name, tokens in with_drafts.tokens.items():
        differing = sum(a != b for a, b in zip(tokens, without.tokens[name], strict=True))
        results.append(Comparison("engine, same seeds", drafter, name, differing, len(tokens)))
    values = []
    for first_X, second_X in zip(with_drafts.samples.T, without.samples.T):
        ids = np.unique(np.concatenate([first_X, second_X]))
        values.append(
            same_law(*(np.bincount(np.searchsorted(ids, x), minlength=len(ids)) for x in (first_X, second_X)))
        )
    p_value = min(1.0, min(values) * len(values))
    return [*results, Comparison("engine, other seeds", drafter, "temperature", p_value=p_value)]
