"""Text of one output: detokenization and stop strings, cut at the same place as the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.tokenization.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenization.stop import StopMatcher
from jaxinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextRules:
    """What a request says about its text.

    Attributes:
        min_tokens: stop strings are not looked for in the text of the first ``min_tokens`` tokens: a match
            has to begin after it, so at least that many tokens remain when it is cut off.
        include_stop: a stop string that was found stays in the text, and its tokens in the output.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class TextDelta(NamedTuple):
    """Attributes:
    text: new text to give out.
    num_tokens: how many tokens of the output, from its start, the text given out so far describes. Give out
        ids and logprobs up to here with it. When the output has ended, these are the tokens to keep.
    stop: the stop string that ended the output, or None.
    """

    text: str
    num_tokens: int
    stop: str | None


class OutputText:
    """Turns tokens into text that ends at a stop string, and says which tokens go with it.

    A token goes out with the first character of its text. One that begins at or after the place where the
    text is cut is not part of the output: there is no entry for a token behind the stop, also when several
    tokens arrive at once. Tokens that ended the output themselves (EOS, stop ids) are fed only if their text
    is wanted.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], rules: TextRules) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids, rules.skip_special_tokens, rules.spaces_between_special_tokens
        )
        self._matcher = StopMatcher(rules.stop_strings, rules.include_stop)
        self._rules = rules
        self._length = 0

    @property
    def token_starts(self) -> Sequence[int]:
        """Offset of each token's text in the output, in characters; see
        ``IncrementalDetokenizer.token_starts``.
        """
        return self._detokenizer.token_starts

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Adds generated tokens; those behind a stop string are ignored."""
        if len(ids) == 1 and self._matcher.stop is None:  # nearly always
            return self._delta(self._push_one(ids[0]), ended=False)
        parts: list[str] = []
        for token_id in ids:
            if self._matcher.stop is not None:
                break
            parts.append(self._push_one(token_id))
        return self._delta("".join(parts), ended=False)

    def finish(self) -> TextDelta:
        """Ends the output: gives out all text held back."""
        if self._matcher.stop is not None:
            return self._delta("", ended=True)
        text = self._matcher.feed(self._detokenizer.finish()).text + self._matcher.flush()
        return self._delta(text, ended=True)

    def _push_one(self, token_id: int) -> str:
        exempt = len(self._detokenizer.token_starts) < self._rules.min_tokens
        text = self._detokenizer.append_one(token_id)
        return self._matcher.skip(text) if exempt else self._matcher.feed(text).text

    def _delta(self, text: str, ended: bool) -> TextDelta:
        self._length += len(text)
        stop = self._matcher.stop
        if stop is not None:
            cut = self._matcher.match_end if self._rules.include_stop else self._matcher.match_begin
            count = self._detokenizer.tokens_before(cut)
        elif ended:
            count = len(self._detokenizer.token_starts)
        else:
            count = self._detokenizer.tokens_before(self._length)
        return TextDelta(text, count, stop)
