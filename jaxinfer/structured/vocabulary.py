"""A tokenizer's vocabulary in the form that grammars work on."""

from collections.abc import Sequence

import llguidance

from jaxinfer.tokenization.tokenizer import Tokenizer

_MARK = "\x02"
"""Put before a text so that a tokenizer that adds a space at the start adds it to this."""

MAX_FORCED_CHARS = 512


class Vocabulary:
    """Bytes of all tokens of a model, built once per engine; takes about a second for 150,000 tokens.

    Args:
        vocab_size: V of the model; ids that the tokenizer lacks are never allowed.
        eos_token_ids: end tokens of the model, allowed where an answer may end. Without any, a grammar ends
            only where nothing can follow.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
        # llguidance needs an end token; one behind the vocabulary is never sampled.
        source = _Source(tokenizer, vocab_size if ends else vocab_size + 1, ends or [vocab_size])
        self.size = vocab_size
        self.num_bits = len(source.tokens)
        self.special_texts = frozenset(
            source.tokens[token].decode("utf-8", "replace") for token in source.special_token_ids
        )
        self.ll = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(source), n_vocab=self.num_bits, eos_token=ends or [vocab_size]
        )


class _Source:
    """What llguidance reads of a tokenizer; the names are its."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        special = tokenizer.special_ids | set(ends)
        self.special_token_ids = sorted(token for token in special if token < size)
        self._special = frozenset(special)
        self._longest_first = _by_bytes(self.tokens, self._special)
        self._longest = max(map(len, self._longest_first), default=1)

    def __call__(self, text: str) -> list[int]:
        """Ordinary tokens that spell the text exactly, the tokenizer's own choice where it does that.

        llguidance asks this for the text that a grammar forces, at every step. Of a long text only the beginning
        is wanted: the rest is asked for again behind it.
        """
        data = text[:MAX_FORCED_CHARS].encode()
        text = data.decode()
        own = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spells(own, data):
            return own
        marked = self._tokenizer.encode(_MARK + text, add_special_tokens=False)
        for start in range(1, min(len(marked), 4)):
            if self._spells(marked[start:], data):
                return marked[start:]
        return self._greedy(data)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        return b"".join(self.tokens[i] for i in ids) == data and self._special.isdisjoint(ids)

    def _greedy(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._longest_first.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    break
            else:
                return ids  # the vocabulary cannot spell it; what it can is still right
            at += length
        return ids


def _by_bytes(tokens: Sequence[bytes], special: frozenset[int]) -> dict[bytes, int]:
    table: dict[bytes, int] = {}
    for token, data in enumerate(tokens):
        if data and token not in special:
            table.setdefault(data, token)
    return table
