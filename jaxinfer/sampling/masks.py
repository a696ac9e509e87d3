"""Packed token masks on the host: bit ``v % 32`` of word ``v // 32`` allows token v."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

ALL = np.uint32(0xFFFFFFFF)

TokenSequences = tuple[tuple[int, ...], ...]


def num_words(vocab: int) -> int:
    """32-bit words of a mask, X."""
    return -(-vocab // 32)


def allow_all(vocab: int) -> np.ndarray:
    """A mask that allows everything, uint32 [X]; writable."""
    return np.full(num_words(vocab), ALL)


def allow_only(token_ids: Iterable[int], vocab: int) -> np.ndarray:
    """A mask of the given tokens, uint32 [X]; ids must be in the vocabulary."""
    ids = np.fromiter(token_ids, np.int64)
    mask_X = np.zeros(num_words(vocab), np.uint32)
    np.bitwise_or.at(mask_X, ids // 32, _bit(ids))
    return mask_X


def ban(mask_X: np.ndarray, token_ids: Iterable[int]) -> None:
    """Takes tokens out of a mask, in place."""
    ids = np.fromiter(token_ids, np.int64)
    np.bitwise_and.at(mask_X, ids // 32, ~_bit(ids))


def unpack(mask_X: np.ndarray, vocab: int) -> np.ndarray:
    """Which tokens a mask allows, bool [V]."""
    return np.unpackbits(mask_X.view(np.uint8), bitorder="little")[:vocab].astype(bool)


def is_empty(mask_X: np.ndarray, vocab: int) -> bool:
    """Whether a mask allows no token of the vocabulary."""
    rest = vocab % 32
    last = mask_X[-1] & np.uint32((1 << rest) - 1) if rest else mask_X[-1]
    return not mask_X[:-1].any() and not last


def bad_word_sequences(bad_words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> TokenSequences:
    """Token sequences that spell the bad words, with and without a leading space.

    Args:
        bad_words: not empty strings.
        encode: text to ids, without special tokens.
    """
    spellings = [encode(prefix + word.lstrip()) for word in bad_words for prefix in ("", " ")]
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if len(ids)))


def completions(sequences: TokenSequences, history: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the sequences after this history of output tokens."""
    found = []
    for ids in sequences:
        start = len(history) - len(ids) + 1
        if start >= 0 and tuple(history[start:]) == ids[:-1]:
            found.append(ids[-1])
    return found


def _bit(ids: np.ndarray) -> np.ndarray:
    return np.uint32(1) << (ids % 32).astype(np.uint32)
