"""From what a user passes to validated sequences: everything that can be wrong with a request is found here."""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

import numpy as np

from jaxinfer.param_checks import InvalidParamsError, as_integer
from jaxinfer.request import Pooling, Request, RequestError, Sequence
from jaxinfer.sampling.keys import stream_key
from jaxinfer.sampling.masks import TokenSequences, bad_word_sequences
from jaxinfer.sampling_params import SamplingParams, validate_for_model
from jaxinfer.structured.choose import ConstraintMaker
from jaxinfer.structured.compiler import GrammarCompiler
from jaxinfer.structured.grammar import Grammar
from jaxinfer.structured.spec import FIELD
from jaxinfer.tokenization.tokenizer import Tokenizer

Prompt = str | Seq[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` with an optional ``cache_salt``."""

MAX_SALT_LENGTH = 128

_POOLED: dict[Pooling, SamplingParams] = {
    # A mean needs the states of all positions, also of those whose blocks are cached.
    "mean": SamplingParams(max_tokens=0, detokenize=False, skip_reading_prefix_cache=True),
    "last": SamplingParams(max_tokens=0, detokenize=False),
}


@dataclass(frozen=True)
class Limits:
    """What the engine can serve.

    Attributes:
        vocab_size: V of the model.
        max_model_len: tokens of prompt and output together.
        max_cached_tokens: tokens that the block pool holds for one sequence.
        num_blocks, block_size: of the pool, for messages.
    """

    vocab_size: int
    max_model_len: int
    max_cached_tokens: int
    num_blocks: int
    block_size: int


class InputProcessor:
    """Tokenizes and validates requests and makes their sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        num_groups: int,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarCompiler | None = None,
        jump_ahead: bool = True,
    ) -> None:
        """Args:
        grammars: None if there is no tokenizer.
        jump_ahead: append tokens that a grammar forces without sampling them.
        """
        self.eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._constraints = ConstraintMaker(tokenizer, limits.vocab_size, eos_token_ids, jump_ahead)
        self._tokenizer = tokenizer
        self._limits = limits
        self._num_groups = num_groups
        self._order = itertools.count()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        add_special_tokens: bool = True,
        compile_grammars: bool = True,
        pooling: Pooling | None = None,
    ) -> list[Sequence]:
        """The sequences of a request, ready to be queued. A grammar is compiled here, which may take a while: callers
        with an event loop use a thread.

        Args:
            compile_grammars: False only validates; the sequences must not be queued if there is a grammar.
            pooling: pool the hidden states of the prompt; ``params`` are of no effect then.

        Raises:
            RequestError: says what is wrong, where, and what is allowed.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {priority!r}", "priority")
        if pooling is not None:
            params = _POOLED[pooling]
        text, ids, salt = self.read(prompt, add_special_tokens)
        self._check_length(ids, params)  # first: it takes no time, whatever the length
        prompt_ids = self._check_ids(ids)
        if self._tokenizer is None and params.detokenize:
            raise RequestError("this engine has no tokenizer; set detokenize=False", "detokenize")
        try:
            validate_for_model(
                params, self._limits.vocab_size, self._limits.max_model_len, self.eos_token_ids
            )
        except InvalidParamsError as error:
            raise RequestError(str(error), error.param) from None
        bad_words = self._bad_words(params)
        self._check_something_is_allowed(params, bad_words)
        grammar = self._grammar(params, compile_grammars)
        request = Request(request_id, text, prompt_ids, params, priority, salt, bad_words, pooling)
        return self._sequences(request, grammar)

    def _grammar(self, params: SamplingParams, compiled: bool) -> Grammar | None:
        spec = params.structured_outputs
        if self._tokenizer is None and params.thinking_token_budget is not None:
            raise RequestError(
                "this engine has no tokenizer; thinking_token_budget needs one", "thinking_token_budget"
            )
        if spec is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine has no tokenizer; structured_outputs need one", FIELD)
        if not compiled:
            self._grammars.check(spec)
            return None
        return self._grammars.compile(spec)

    def _sequences(self, request: Request, grammar: Grammar | None) -> list[Sequence]:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        room = min(self._limits.max_model_len, self._limits.max_cached_tokens) - num_prompt
        max_tokens = max(room, 0) if params.max_tokens is None else min(params.max_tokens, room)
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    order=next(self._order),
                    max_tokens=max_tokens,
                    key=stream_key(params.seed, request.prompt_token_ids, index),
                    num_groups=self._num_groups,
                    parent=sequences[0] if sequences else None,
                    constraint=self._constraints.make(
                        params, request.prompt_token_ids, request.bad_words, grammar
                    ),
                )
            )
        return sequences

    def _bad_words(self, params: SamplingParams) -> TokenSequences:
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; bad_words need one", "bad_words")
        tokenizer = self._tokenizer
        return bad_word_sequences(
            params.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
        )

    def _check_something_is_allowed(self, params: SamplingParams, bad_words: TokenSequences) -> None:
        if params.allowed_token_ids is None or not bad_words:
            return
        banned = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens > 0:
            banned |= {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if set(params.allowed_token_ids) <= banned:
            raise RequestError("bad_words and min_tokens ban all of allowed_token_ids", "allowed_token_ids")

    def read(
        self, prompt: Prompt, add_special_tokens: bool = True
    ) -> tuple[str | None, Seq[int], str | None]:
        """Text (if that was given), token ids and cache salt of a prompt; the ids are not checked yet.

        Raises:
            RequestError: the prompt has a wrong form, or cannot be tokenized.
        """
        text: Any = None
        ids: Any = None
        salt: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or ("prompt_token_ids" in prompt) == ("prompt" in prompt):
                raise RequestError(
                    "a prompt mapping holds either 'prompt' or 'prompt_token_ids', and optionally 'cache_salt'; "
                    f"given: {', '.join(map(str, prompt)) or 'nothing'}",
                    "prompt",
                )
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        else:
            ids = prompt
        _check_salt(salt)
        if ids is None:
            ids = self._encode(text, add_special_tokens)
        flat = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, Seq)
        if not flat or isinstance(ids, str | bytes | bytearray | memoryview):
            raise RequestError(f"token ids are a flat list of integers, not {type(ids).__name__}", "prompt")
        return text, ids, salt

    def _encode(self, text: Any, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be a string, not {type(text).__name__}", "prompt")
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; pass prompt_token_ids", "prompt")
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_ids(self, ids: Seq[Any]) -> tuple[int, ...]:
        if len(ids) == 0:
            raise RequestError("the prompt has no tokens; at least one is needed", "prompt")
        vocab = self._limits.vocab_size
        tokens = []
        for position, item in enumerate(ids):
            token = as_integer(item)
            if token is None:
                raise RequestError(
                    f"prompt token {position} is {brief(item)}; token ids are integers", "prompt"
                )
            if not 0 <= token < vocab:
                shown = token if token.bit_length() <= 64 else f"a number of {token.bit_length()} bits"
                raise RequestError(
                    f"prompt token {position} is {shown}, outside the vocabulary (0 to {vocab - 1})", "prompt"
                )
            tokens.append(token)
        return tuple(tokens)

    def _check_length(self, ids: Seq[int], params: SamplingParams) -> None:
        """A prompt needs room for one more token, unless it is only scored."""
        limits = self._limits
        needed = len(ids) + (params.max_tokens != 0)
        if needed > limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the context is {limits.max_model_len} tokens, prompt and "
                "output together",
                "prompt",
            )
        if needed > limits.max_cached_tokens:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and needs {-(-needed // limits.block_size)} blocks of "
                f"{limits.block_size}, but the KV cache has only {limits.num_blocks}",
                "prompt",
            )


def _check_salt(salt: Any) -> None:
    if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_LENGTH):
        raise RequestError(f"cache_salt must be a string of 1 to {MAX_SALT_LENGTH} characters", "cache_salt")
