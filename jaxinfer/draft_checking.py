"""Every kind of drafter in a whole engine, held against a law that is computed apart: a part of ``verify-spec``.

The target is a transformer whose attention and MLP add nothing, so what it says follows from its newest token by a
table, and the processed law of every position is known. A token is drawn by one uniform number, which depends on the
request's seed and the position; so each token of each request has to be the one in whose interval that number lies,
whatever was drafted. That holds the drafter's own proposals, the scheduler, the sampler and the acceptance to the law,
token by token; and with uniform numbers the law is the target's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.known_law import KINDS, Kind, TinyTarget
from jaxinfer.request import Sequence
from jaxinfer.sampling.law import uniforms
from jaxinfer.speculative.check.matrix import Check, Finding
from jaxinfer.speculative.check.target import PROMPT, SETTINGS, Target

LENGTH = 12
"""Tokens of each request."""

EDGE = 1e-5
"""Distance of a number from the end of an interval within which rounding decides."""


def drafter_checks(sequences: int = 12, seed: int = 0) -> Iterator[Check]:
    """A cell for each kind of drafter and setting; those of a kind share one run of an engine.

    Args:
        sequences: of each cell.
    """
    target = TinyTarget(seed)
    for name, kind in KINDS.items():
        run = cache(partial(_run, target, kind, sequences))
        for setting in SETTINGS:
            yield partial(_finding, name, kind, setting, run)


Run = Callable[[], Mapping[str, tuple[int, int]]]
"""Tokens, and wrong ones among them, by setting."""


def _finding(name: str, kind: Kind, setting: str, run: Run) -> Finding:
    tokens, wrong = run()[setting]
    return Finding(f"engine, {name.partition(',')[0]}", kind.drafts, setting, tokens=tokens, wrong=wrong)


def _run(target: TinyTarget, kind: Kind, sequences: int) -> Mapping[str, tuple[int, int]]:
    """All settings side by side in one batch."""
    engine, logits_VV = target.engine(kind), target.logits()
    made: list[tuple[str, Sequence]] = []
    for i in range(sequences):
        for setting, params in SETTINGS.items():
            own = replace(params, seed=i, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
            made += [
                (setting, seq)
                for seq in engine.inputs.process(f"{i} {setting}", {"prompt_token_ids": list(PROMPT)}, own)
            ]
    engine.core.add([seq for _, seq in made])
    while engine.core.has_work:
        engine.core.step()
    stats = engine.core.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens, "nothing was accepted, or nothing refused"
    counts = dict.fromkeys(SETTINGS, (0, 0))
    targets = {setting: Target(logits_VV, params) for setting, params in SETTINGS.items()}
    for (setting, seq), numbers in zip(made, _numbers([seq for _, seq in made])):
        tokens, wrong = counts[setting]
        found = _wrong(targets[setting], tuple(seq.output_token_ids), numbers)
        counts[setting] = tokens + LENGTH, wrong + found
    return counts


def _numbers(sequences: list[Sequence]) -> list[list[float]]:
    """The uniform numbers of the positions behind the prompt."""
    key_P2 = jnp.asarray(np.repeat([seq.key for seq in sequences], LENGTH, axis=0), jnp.uint32)
    position_P = jnp.asarray(np.tile(len(PROMPT) + np.arange(LENGTH), len(sequences)), jnp.int32)
    return np.asarray(uniforms(key_P2, position_P)).reshape(-1, LENGTH).tolist()


def _wrong(target: Target, outputs: tuple[int, ...], numbers: list[float]) -> int:
    """Tokens in whose interval the number of their position does not lie, and those that are missing."""
    wrong = LENGTH - len(outputs)
    for i, (token, number) in enumerate(zip(outputs, numbers)):
        law_V = target.law(outputs[:i])
        end = float(law_V[: token + 1].sum())
        wrong += not (law_V[token] > 0 and end - law_V[token] - EDGE <= number <= end + EDGE)
    return wrong
