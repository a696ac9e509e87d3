"""Grammars by llguidance (github.com/guidance-ai/llguidance): which tokens may follow, as masks."""

from copy import copy

import numpy as np
from llguidance import LLMatcher

from jaxinfer.structured.constraint import Constraint, everything
from jaxinfer.structured.vocabulary import Vocabulary

MAX_JUMP_BYTES = 4096
"""Longer forced texts are sampled token by token: finding their tokens takes time in proportion to their square."""


class Grammar:
    """A compiled grammar; immutable, shared between requests and threads.

    Args:
        matcher: at the start of the grammar.
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    def start(self, jump: bool = False) -> Constraint:
        """The state of one answer, at its beginning.

        Args:
            jump: name the tokens that the grammar forces.
        """
        return GrammarConstraint(self._vocabulary, self._matcher.deep_copy(), jump)


class GrammarConstraint:
    """One answer's way through a grammar."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, jump: bool) -> None:
        self._matcher = matcher
        self._jump = jump
        self._num_words = -(-vocabulary.num_bits // 32)
        self._within_X = everything(vocabulary.size)

    def next_mask(self) -> np.ndarray:
        mask_X = np.zeros(self._num_words, np.uint32)
        if self._is_dead:
            return mask_X[: len(self._within_X)]
        self._matcher.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
        if self._is_dead:  # that is only found when the mask is computed
            mask_X[:] = 0
        return mask_X[: len(self._within_X)] & self._within_X

    def accept(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)

    def fork(self) -> "GrammarConstraint":
        forked = copy(self)
        forked._matcher = self._matcher.deep_copy()
        return forked

    def forced(self) -> list[int]:
        return self.expected() if self._jump else []

    def expected(self) -> list[int]:
        if self._matcher.is_stopped():
            return []
        if len(self._matcher.compute_ff_bytes()) > MAX_JUMP_BYTES:
            return []
        return self._matcher.compute_ff_tokens()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped() and not self._is_dead

    @property
    def may_end(self) -> bool:
        return not self._matcher.is_error() and self._matcher.is_accepting()

    @property
    def _is_dead(self) -> bool:
        """Nothing may follow and the text is no whole answer, or a limit of the parser is exceeded."""
        matcher = self._matcher
        return matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting())
