"""How well a head drafts, measured on text without the engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.models.segments import Leaves
from jaxinfer.speculative.training.batches import in_order
from jaxinfer.speculative.training.features import SequenceFeatures
from jaxinfer.speculative.training.objective import Frozen, Objective, Scores


@dataclass(frozen=True)
class Acceptance:
    """Greedy chains of drafts against the target's greedy tokens.

    Exact where the text is the target's own greedy output; on other text only places are judged at which the tokens
    before a draft are the target's greedy ones.

    Attributes:
        per_position: share of places at which draft j and all before it are right.
        mean_length: tokens per pass of the target, when the text is decoded from its prompt with such drafts.
        places: places that were judged.
    """

    per_position: tuple[float, ...]
    mean_length: float
    places: int


class Evaluator:
    """Measures on the same text again and again, with one compiled program."""

    def __init__(
        self,
        objective: Objective,
        frozen: Frozen,
        sequences: Sequence[SequenceFeatures],
        batch: int,
        length: int,
    ) -> None:
        self._sequences, self._batch, self._length = sequences, batch, length
        self._measure, self._frozen = jax.jit(objective.accepted), frozen

    def __call__(self, leaves: Leaves) -> Acceptance:
        total: Scores | None = None
        tokens = passes = 0
        for group, batch in in_order(self._sequences, self._batch, self._length):
            accepted_Bn, scores = self._measure(leaves, self._frozen, batch)
            total = scores if total is None else total + scores
            for sequence, accepted_n in zip(group, np.asarray(accepted_Bn)):
                n = len(sequence.token_ids)
                steps = list(walk(accepted_n[:n], sequence.prompt_len))
                tokens, passes = tokens + sum(steps), passes + len(steps)
        assert total is not None
        judged = int(np.asarray(total.judged_J)[0])
        return Acceptance(tuple(total.acceptance()), tokens / max(1, passes), judged)


def walk(accepted_n: np.ndarray, prompt_len: int) -> Iterable[int]:
    """Tokens that each pass of the target yields when a text is decoded.

    Args:
        accepted_n: drafts that are accepted where token i is the newest one.
        prompt_len: index of the first token that was generated; it comes from the prompt's own pass.
    """
    place = prompt_len
    while place < len(accepted_n):
        step = int(accepted_n[place]) + 1
        yield step
        place += step
