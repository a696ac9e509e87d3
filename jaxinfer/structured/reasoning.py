"""Models that think first: a form that starts behind the reasoning, and a limit on the reasoning's length."""

from collections.abc import Sequence
from copy import copy
from typing import Literal

import numpy as np

from jaxinfer.sampling.masks import allow_only, ban
from jaxinfer.structured.constraint import Constraint, everything
from jaxinfer.tokenization.tokenizer import Tokenizer

THINK_START, THINK_END = b"<think>", b"</think>"
LOOK_BACK = 64
"""Tokens at the end of a prompt in which a marker is looked for."""

Phase = Literal["start", "open", "think", "answer"]
"""Before the first token; inside the start marker; inside the reasoning; behind it."""


class Reasoning:
    """Follows one answer through ``<think> ... </think>``, then hands over to the answer's form.

    Whether the model is thinking already is read off the prompt: chat templates may open the reasoning, or close it at
    once. Otherwise the first token decides: it opens the reasoning, or it begins the answer. Markers are
    found in bytes, so they need not be tokens of their own.

    Args:
        budget: most tokens of reasoning; then the end marker is forced. None: no limit.
        answer: the form of what follows the reasoning, or None for free text.
        end_token_ids: banned while thinking if a form follows, or the answer would be missing.
        jump: name the tokens of a forced end marker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        prompt_ids: Sequence[int],
        budget: int | None,
        answer: Constraint | None,
        end_token_ids: Sequence[int],
        jump: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._budget = budget
        self._answer = answer
        self._ends = [token for token in end_token_ids if token < vocab]
        self._jump = jump
        self._start_ids = tokenizer.encode(THINK_START.decode(), add_special_tokens=False)
        self._end_ids = tokenizer.encode(THINK_END.decode(), add_special_tokens=False)
        self._phase: Phase = _phase_of(b"".join(map(tokenizer.token_bytes, prompt_ids[-LOOK_BACK:])))
        self._opened = 0
        self._spent = 0
        self._closing: list[int] = []
        self._tail = b""
        self._check_budget()

    def next_mask(self) -> np.ndarray:
        if self._closing:
            return allow_only(self._closing[:1], self._vocab)
        if self._phase == "open":
            return allow_only([self._start_ids[self._opened]], self._vocab)
        if self._phase == "think":
            mask_X = everything(self._vocab)
            if self._answer is not None:
                ban(mask_X, self._ends)
            return mask_X
        mask_X = everything(self._vocab) if self._answer is None else self._answer.next_mask()
        if self._phase == "start":
            mask_X |= allow_only(self._start_ids[:1], self._vocab)
        return mask_X

    def accept(self, token_id: int) -> bool:
        if self._phase == "answer":
            return self._answer is None or self._answer.accept(token_id)
        if self._phase == "think":
            self._think(token_id)
            return True
        return self._start(token_id)

    def fork(self) -> "Reasoning":
        forked = copy(self)  # its lists are replaced, never changed
        forked._answer = None if self._answer is None else self._answer.fork()
        return forked

    def forced(self) -> list[int]:
        if self._closing:
            return list(self._closing) if self._jump else []
        return self._answer.forced() if self._phase == "answer" and self._answer is not None else []

    def expected(self) -> list[int]:
        if self._closing:
            return list(self._closing)
        return self._answer.expected() if self._phase == "answer" and self._answer is not None else []

    @property
    def complete(self) -> bool:
        return self._phase == "answer" and self._answer is not None and self._answer.complete

    @property
    def may_end(self) -> bool:
        return self._phase in ("answer", "start") and self._answer is not None and self._answer.may_end

    def _start(self, token_id: int) -> bool:
        """The first tokens: the start marker, or the answer."""
        if self._answer is None:
            self._start_free(token_id)
            return True
        if token_id == self._start_ids[self._opened]:
            self._opened += 1
            self._phase = "think" if self._opened == len(self._start_ids) else "open"
            self._check_budget()
            return True
        if self._phase == "open":
            return False
        self._phase = "answer"
        return self._answer.accept(token_id)

    def _start_free(self, token_id: int) -> None:
        """The first tokens of free text, in which the marker may be spelled in any way."""
        self._tail += self._tokenizer.token_bytes(token_id)
        if self._tail.lstrip().startswith(THINK_START):
            self._phase, self._tail = "think", b""
            self._check_budget()
        elif not THINK_START.startswith(self._tail.lstrip()):
            self._phase = "answer"

    def _think(self, token_id: int) -> None:
        self._tail += self._tokenizer.token_bytes(token_id)
        if THINK_END in self._tail:
            self._phase, self._closing = "answer", []
            return
        self._tail = self._tail[-len(THINK_END) + 1 :]
        if self._closing:
            self._closing = self._closing[1:]
            if not self._closing:
                self._phase = "answer"
            return
        self._spent += 1
        self._check_budget()

    def _check_budget(self) -> None:
        if self._phase == "think" and self._budget is not None and self._spent >= self._budget:
            self._closing = list(self._end_ids)


def _phase_of(prompt: bytes) -> Phase:
    """Where the answer begins. A marker counts only at the very end: others may be somebody's text."""
    prompt = prompt.rstrip()
    if prompt.endswith(THINK_START):
        return "think"
    return "answer" if prompt.endswith(THINK_END) else "start"
