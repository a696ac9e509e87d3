"""Log-probabilities in the shapes that clients read."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.deltas import TokenLogprobs
from jaxinfer.tokenization.tokenizer import Tokenizer, token_text

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot spell."""


class LogprobWriter:
    """Spells tokens and their log-probabilities.

    Args:
        tokenizer: None: tokens are spelled as ids.
        as_token_ids: spell them as ``token_id:ID`` anyway.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_token_ids: bool) -> None:
        self._tokenizer = None if as_token_ids else tokenizer

    def token(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return token_text(self._tokenizer, token_id)

    def top_of(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Texts of the most likely tokens, those named and the chosen one. Of tokens with the same text, the most
        likely one counts."""
        found: dict[str, float] = {}
        chosen = (entry.token_id, entry.logprob)
        for token, value in (*entry.top[:num_top], chosen, *entry.named):
            text = self.token(token)
            found[text] = max(found.get(text, LOWEST), clamp(value))
        return found

    def prompt(self, entries: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[int, Any] | None]:
        """``prompt_logprobs``: per position the entries by token id, null for the first."""
        return [None if entry is None else self._position(entry, num_top) for entry in entries]

    def _position(self, entry: TokenLogprobs, num_top: int) -> dict[int, Any]:
        found = {entry.token_id: self._entry(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token, value) in enumerate(entry.top[:num_top], start=1):
            found.setdefault(token, self._entry(token, value, rank))
        for token, value in entry.named:
            found.setdefault(token, self._entry(token, value, None))
        return found

    def _entry(self, token: int, value: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": clamp(value), "rank": rank, "decoded_token": self.token(token)}


def clamp(value: float) -> float:
    return max(value, LOWEST)
