"""From the news of a choice to what ``/v1/completions`` says about it; the same for streams and whole answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.engine.deltas import TokenLogprobs
from jaxinfer.tokenization.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenization.tokenizer import Tokenizer
from serve.generation import ChoiceNews
from serve.logprobs import LogprobWriter, clamp
from serve.protocol.completions import CompletionChoice, CompletionLogprobs


@dataclass(frozen=True)
class CompletionOptions:
    """What answers show.

    Attributes:
        num_top: most likely tokens per token; None: no log-probabilities.
        num_prompt_top: those of ``prompt_logprobs``, which is something else than ``echo``; None: not asked for.
        skip_special_tokens, spaces_between_special_tokens: as the request says; they move the offsets.
    """

    tokenizer: Tokenizer | None
    writer: LogprobWriter
    echo: bool
    num_top: int | None
    num_prompt_top: int | None
    token_ids: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


@dataclass(frozen=True)
class EchoedPrompt:
    """The prompt as answers repeat it.

    Attributes:
        text: what the client sent, or the text of its token ids.
        offsets: where each token begins in it.
    """

    text: str
    offsets: Sequence[int]


def echoed_prompt(text: str | None, ids: Sequence[int], options: CompletionOptions) -> EchoedPrompt:
    """Args:
    text: the prompt if it was a text.
    """
    tokenizer = options.tokenizer
    if tokenizer is None:
        return EchoedPrompt("", [0] * len(ids))
    hide = options.skip_special_tokens and text is None
    detokenizer = IncrementalDetokenizer(tokenizer, (), hide, options.spaces_between_special_tokens)
    decoded = detokenizer.append(ids) + detokenizer.finish()
    if text is None:
        return EchoedPrompt(decoded, list(detokenizer.token_starts))
    # Tokens that the tokenizer put in front are not in the client's text; a normalizer may have changed it too.
    added = max(decoded.find(text), 0)
    return EchoedPrompt(text, [min(max(start - added, 0), len(text)) for start in detokenizer.token_starts])


class CompletionWriter:
    """Writes one choice.

    Args:
        prompt_text: the prompt if it was a text, for ``echo``.
    """

    def __init__(
        self, index: int, prompt_text: str | None, prompt_ids: Sequence[int], options: CompletionOptions
    ) -> None:
        self._index = index
        self._prompt_text = prompt_text
        self._prompt_ids = prompt_ids
        self._options = options
        self._base = 0
        self._offsets: IncrementalDetokenizer | None = None
        if options.num_top is not None and options.tokenizer is not None:
            self._offsets = IncrementalDetokenizer(
                options.tokenizer,
                prompt_ids,
                options.skip_special_tokens,
                options.spaces_between_special_tokens,
            )

    def write(self, news: ChoiceNews) -> CompletionChoice:
        """What is new. The first news lead with the echoed prompt."""
        options = self._options
        choice = CompletionChoice(self._index, news.text, None, news.finish_reason, news.stop_reason)
        echoed = None
        if news.first and options.echo:
            echoed = echoed_prompt(self._prompt_text, self._prompt_ids, options)
            self._base = len(echoed.text)
            choice.text = echoed.text + news.text
        if options.num_top is not None:
            shown = CompletionLogprobs([], [], [], [])
            if echoed is not None:
                self._add(shown, news.prompt_logprobs or (), self._prompt_ids, echoed.offsets)
            self._add(shown, news.logprobs, news.token_ids, self._token_offsets(news.token_ids))
            choice.logprobs = shown
        if options.token_ids:
            choice.token_ids = news.token_ids
        if news.first and options.token_ids:
            choice.prompt_token_ids = list(self._prompt_ids)
        if news.first and options.num_prompt_top is not None:
            choice.prompt_logprobs = options.writer.prompt(news.prompt_logprobs or (), options.num_prompt_top)
        return choice

    def _token_offsets(self, ids: Sequence[int]) -> list[int]:
        if self._offsets is None:
            return [self._base] * len(ids)
        before = len(self._offsets.token_starts)
        self._offsets.append(ids)
        return [self._base + start for start in self._offsets.token_starts[before:]]

    def _add(
        self,
        shown: CompletionLogprobs,
        entries: Sequence[TokenLogprobs | None],
        ids: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        writer, num_top = self._options.writer, self._options.num_top
        assert num_top is not None
        shown.text_offset += offsets
        shown.tokens += [writer.token(token) for token in ids]
        for entry in entries:
            shown.token_logprobs.append(None if entry is None else clamp(entry.logprob))
            shown.top_logprobs.append(None if entry is None else writer.top_of(entry, num_top))
