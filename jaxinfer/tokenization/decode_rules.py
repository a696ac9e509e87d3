"""What bytes a token stands for, read off the decoder of a ``tokenizers`` tokenizer.

A decoder works on a list of tokens. For the decoders that language models use, its result is the
concatenation of one byte string per token, apart from two effects that need the context; ``DecodeRules``
names them. Knowing the bytes makes incremental detokenization exact and cheap: nothing is decoded twice.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or does not do what was asked of it."""


@dataclass(frozen=True)
class DecodeRules:
    """How the text of a token sequence differs from its concatenated bytes.

    Attributes:
        strip_leading_space: a full decode drops one space at its very start (SentencePiece's dummy prefix).
        replace_each_byte: bytes that are not UTF-8 give one U+FFFD each (byte fallback); otherwise one per
            maximal subpart, as Unicode recommends and as byte-level decoders do.
    """

    strip_leading_space: bool = False
    replace_each_byte: bool = False


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's reversible map from characters to bytes: printable Latin-1 stands for itself, the rest is moved
    up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(list(moved))})
    return alphabet


def _byte_level_bytes() -> Callable[[str], bytes]:
    alphabet = byte_level_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token with a character outside the alphabet stands for its own text
            return token.encode()

    return to_bytes


def _spm_bytes(byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes([int(match[1], 16)]) if match else token.replace(SPACE_MARK, " ").encode()

    return to_bytes


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_space_replacement(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "


def _is_leading_space_strip(step: dict[str, Any]) -> bool:
    return (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0)


def read_decoder(backend: Backend) -> tuple[Callable[[str], bytes], DecodeRules]:
    """Token string to bytes, and the context rules, of a backend's decoder.

    Raises:
        TokenizerError: a decoder that is not a concatenation of token bytes.
    """
    state = backend.decoder
    if state is None:
        raise TokenizerError("the tokenizer has no decoder, so its tokens do not concatenate to text")
    steps = _steps(json.loads(state.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes(), DecodeRules()
    if kinds == ["Metaspace"]:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return _spm_bytes(byte_fallback=False), DecodeRules(strip_leading_space=strips)
    strips, fallback = False, False
    for kind, step in zip(kinds, steps):
        if kind == "ByteFallback":
            fallback = True
        elif kind == "Strip" and _is_leading_space_strip(step):
            strips = True
        elif not (kind == "Fuse" or (kind == "Replace" and _is_space_replacement(step))):
            known = "ByteLevel; Metaspace; a sequence of Replace(U+2581 -> space), ByteFallback, Fuse, Strip"
            raise TokenizerError(f"decoder step {step!r} is not supported; supported: {known}")
    return _spm_bytes(fallback), DecodeRules(strips, replace_each_byte=fallback)
