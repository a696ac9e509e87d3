"""What a sequence may generate next, where that depends on the tokens before."""

from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np

from jaxinfer.sampling.masks import ALL, TokenSequences, allow_all, allow_only, ban, completions


class Constraint(Protocol):
    """Tokens that one sequence may generate. It sees every generated token once, in order.

    The engine asks for a mask when all tokens before it are known to the host, and the mask is exact: a sampled token
    is always accepted. Masks are packed, uint32 [X], and zero behind the vocabulary.
    """

    def next_mask(self) -> np.ndarray:
        """The tokens allowed next, as a new array; without any if nothing can follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes note of the next token. False: it is not allowed, and nothing is defined any more."""
        ...

    def fork(self) -> "Constraint":
        """A copy that goes its own way: the masks along a path of drafts are filled by one."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as they are known; empty where there is a choice or jumps are off."""
        ...

    def expected(self) -> list[int]:
        """As ``forced``, for drafts, which are verified: also where jumps are off or something else may ban them."""
        ...

    @property
    def complete(self) -> bool:
        """The answer is finished: no further token may come."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the text so far is a whole answer."""
        ...


class AllOf:
    """Several constraints at once. It forces nothing: what one forces may be banned by another."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = tuple(parts)

    def next_mask(self) -> np.ndarray:
        combined_X = self._parts[0].next_mask()
        for part in self._parts[1:]:
            combined_X &= part.next_mask()
        return combined_X

    def accept(self, token_id: int) -> bool:
        accepted = [part.accept(token_id) for part in self._parts]  # each of them must see the token
        return all(accepted)

    def fork(self) -> "AllOf":
        return AllOf([part.fork() for part in self._parts])

    def forced(self) -> list[int]:
        return []

    def expected(self) -> list[int]:
        return next((tokens for part in self._parts if (tokens := part.expected())), [])

    @property
    def complete(self) -> bool:
        return any(part.complete for part in self._parts)

    @property
    def may_end(self) -> bool:
        return all(part.may_end for part in self._parts)


class TokenRules:
    """Bans that a request names: allowed ids, bad words, and end tokens before ``min_tokens``.

    Args:
        vocab: V.
        allowed: the only ids allowed, or None.
        bad_words: token sequences that must not occur.
        end_token_ids: banned until ``min_tokens`` tokens exist.
        ends_alone: whether an answer may end by itself, which without a form it never does.
    """

    def __init__(
        self,
        vocab: int,
        allowed: Sequence[int] | None,
        bad_words: TokenSequences,
        end_token_ids: Sequence[int],
        min_tokens: int,
        ends_alone: bool,
    ) -> None:
        self._static_X = everything(vocab) if allowed is None else allow_only(allowed, vocab)
        ban(self._static_X, [ids[0] for ids in bad_words if len(ids) == 1])
        self._phrases = tuple(ids for ids in bad_words if len(ids) > 1)
        self._longest = max(map(len, self._phrases), default=0)
        self._ends = [token for token in end_token_ids if token < vocab]
        self._min_tokens = min_tokens
        self._history: list[int] = []
        self._count = 0
        self.may_end = ends_alone

    def next_mask(self) -> np.ndarray:
        mask_X = self._static_X.copy()
        banned = completions(self._phrases, self._history)
        if self._count < self._min_tokens:
            banned += self._ends
        ban(mask_X, banned)
        return mask_X

    def accept(self, token_id: int) -> bool:
        self._count += 1
        if self._longest:
            self._history = [*self._history, token_id][1 - self._longest :]
        return True

    def fork(self) -> "TokenRules":
        return copy(self)  # the history is replaced, never changed

    def forced(self) -> list[int]:
        return []

    def expected(self) -> list[int]:
        return []

    @property
    def complete(self) -> bool:
        return False


def everything(vocab: int) -> np.ndarray:
    """A mask of all V tokens and nothing behind them, uint32 [X]."""
    mask_X = allow_all(vocab)
    if vocab % 32:
        mask_X[-1] = ALL >> np.uint32(32 - vocab % 32)
    return mask_X
