"""Small tokenizers for tests, as the failure cases define them: BYTE-TOK and SPM-TOK."""

import re
from collections.abc import Mapping, Sequence

from jaxinfer.tokenization.decode_rules import DecodeRules

_FIRST_SPECIAL, _FIRST_LITERAL, VOCAB_SIZE = 256, 264, 320
_SPACE_MARK = "\u2581"


class _TestTokenizer:
    """What both have in common: a table of token strings, and longest match first when encoding."""

    def __init__(
        self,
        strings: Sequence[str],
        data: Sequence[bytes],
        special_ids: frozenset[int],
        bos: int,
        eos: tuple[int, ...],
    ) -> None:
        self._strings, self._data = list(strings), list(data)
        self.special_ids = special_ids
        self.bos_token_id: int | None = bos
        self.eos_token_ids = eos
        self.add_bos = False

    @property
    def vocab_size(self) -> int:
        return len(self._strings)

    def token_bytes(self, token_id: int) -> bytes:
        return self._data[token_id] if 0 <= token_id < len(self._data) else b""

    def token_str(self, token_id: int) -> str:
        return self._strings[token_id] if 0 <= token_id < len(self._strings) else ""

    def id_of(self, token: str) -> int:
        """Id of a token by its string; KeyError if there is none."""
        if token not in self._strings or not token:
            raise KeyError(token)
        return self._strings.index(token)

    def _encode(self, text: str, tokens: Mapping[str, int], byte_offset: int) -> list[int]:
        """Longest of ``tokens`` first; what is between them, as bytes."""
        if not tokens:
            return [byte_offset + byte for byte in text.encode()]
        pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        ids: list[int] = []
        for piece in re.split(f"({pattern})", text):
            ids += [tokens[piece]] if piece in tokens else [byte_offset + byte for byte in piece.encode()]
        return ids

    def _with_bos(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        bos = (
            [self.bos_token_id]
            if self.add_bos and add_special_tokens and self.bos_token_id is not None
            else []
        )
        return bos + ids


class ByteTokenizer(_TestTokenizer):
    """BYTE-TOK: ids 0-255 are bytes, 256 BOS, 257 and 258 EOS, 259-263 other specials, 264-319 literals.

    The specials are spelled ``<|bos|>``, ``<|eos|>``, ``<|eos2|>``, ``<|special0|>`` ... ``<|special4|>``;
    they and the literals are recognized in text.

    Args:
        literals: token strings for the ids from 264 on, such as ``("EFG", " cat", "<think>")``.
        add_bos: whether ``encode`` puts BOS first.
        eos: which ids end a generation.
    """

    decode_rules = DecodeRules()

    def __init__(
        self, literals: Sequence[str] = (), add_bos: bool = False, eos: tuple[int, ...] = (257, 258)
    ) -> None:
        specials = ["<|bos|>", "<|eos|>", "<|eos2|>", *(f"<|special{i}|>" for i in range(5))]
        unused = [""] * (VOCAB_SIZE - _FIRST_LITERAL - len(literals))
        named = [*specials, *literals, *unused]
        strings = [chr(byte) if byte < 128 else f"<{byte:#04x}>" for byte in range(256)] + named
        data = [bytes([byte]) for byte in range(256)] + [name.encode() for name in named]
        super().__init__(strings, data, frozenset(range(_FIRST_SPECIAL, _FIRST_LITERAL)), 256, eos)
        self.add_bos = add_bos
        self._tokens = {name: _FIRST_SPECIAL + i for i, name in enumerate(named) if name}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._with_bos(self._encode(text, self._tokens, byte_offset=0), add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")


class SpmTokenizer(_TestTokenizer):
    """SPM-TOK: 0 ``<unk>``, 1 ``<s>``, 2 ``</s>``, 3-258 byte tokens, then ``pieces``, where ``_`` is the
    space mark.

    A full decode strips one leading space; a run of byte tokens that is not UTF-8 gives one U+FFFD per byte.

    Args:
        pieces: for example ``("_cat", "_sat", ".", "_")``.
        add_bos: whether ``encode`` puts BOS first.
    """

    decode_rules = DecodeRules(strip_leading_space=True, replace_each_byte=True)

    def __init__(self, pieces: Sequence[str] = (), add_bos: bool = False) -> None:
        specials = ["<unk>", "<s>", "</s>"]
        marked = [piece.replace("_", _SPACE_MARK) for piece in pieces]
        unused = [""] * max(VOCAB_SIZE - 259 - len(pieces), 0)
        strings = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *marked, *unused]
        data = [name.encode() for name in specials] + [bytes([byte]) for byte in range(256)]
        data += [piece.replace("_", " ").encode() for piece in pieces] + [b"" for _ in unused]
        super().__init__(strings, data, frozenset(range(3)), 1, (2,))
        self.add_bos = add_bos
        self._tokens = {piece: 259 + i for i, piece in enumerate(marked) if piece}

    def ids(self, script: Sequence[str | int]) -> list[int]:
        """Ids of a script: a number is a byte token, a string a piece or special (``_`` is the space mark)."""
        return [
            3 + item if isinstance(item, int) else self.id_of(item.replace("_", _SPACE_MARK))
            for item in script
        ]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        marked = (" " + text).replace(" ", _SPACE_MARK) if text else ""
        return self._with_bos(self._encode(marked, self._tokens, byte_offset=3), add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts: list[str] = []
        run = b""
        for token_id in [i for i in ids if not (skip_special_tokens and i in self.special_ids)]:
            if 3 <= token_id < 259:
                run += self.token_bytes(token_id)
                continue
            parts += [_decode_run(run), self.token_bytes(token_id).decode()]
            run = b""
        return "".join([*parts, _decode_run(run)]).removeprefix(" ")


def _decode_run(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
