"""Vocabularies in GGUF metadata, on small ones made by hand."""

import random
from itertools import pairwise
from typing import Any

import pytest

from jaxinfer.tokenization.decode_rules import TokenizerError, byte_level_alphabet
from jaxinfer.tokenization.gguf_vocabulary import build_tokenizer, read_vocabulary
from jaxinfer.tokenization.pretokenizers import PRE_TOKENIZATIONS
from jaxinfer.tokenization.tokenizer import HFTokenizer

MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def load(metadata: dict[str, Any]) -> HFTokenizer:
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return HFTokenizer(*build_tokenizer(read_vocabulary(prefixed)))


def spm_metadata(pieces: list[str], user_defined: tuple[str, ...] = (), **extra: Any) -> dict[str, Any]:
    """SentencePiece vocabulary; earlier pieces have better scores, as its trainer gives them."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *user_defined]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(user_defined)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0] * len(user_defined)
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **extra,
    }


PIECES = [
    *(left + right for left in "abc" + MARK for right in "abc"),
    "abc",
    "bca",
    MARK + "ab",
    "aa" + "bb",
    "cabc",
]
ALL_PIECES = [*PIECES, "a", "b", "c", MARK]


def merge_by_score(text: str, pieces: list[str]) -> list[str]:
    """SentencePiece's BPE as defined: of all neighbours the union with the best score, leftmost first."""
    rank = {piece: index for index, piece in enumerate(pieces)}
    symbols = list(text)
    while True:
        unions = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in rank]
        if not unions:
            return symbols
        _, index = min(unions)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@pytest.mark.parametrize("seed", range(50))
def test_sentencepiece_merges_by_score(seed: int) -> None:
    tokenizer = load(spm_metadata(ALL_PIECES))
    source = random.Random(seed)
    text = "".join(source.choices("abc ", k=source.randrange(1, 30)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    marked = (MARK + text).replace(" ", MARK)
    assert [tokenizer.token_str(i) for i in ids] == merge_by_score(marked, ALL_PIECES)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_byte_fallback_and_bos() -> None:
    tokenizer = load(spm_metadata(ALL_PIECES))
    ids = tokenizer.encode("a€")
    assert [tokenizer.token_str(i) for i in ids] == ["<s>", MARK + "a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b" a", b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.decode(ids) == "a€"
    assert tokenizer.add_bos
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode_rules.strip_leading_space
    assert tokenizer.decode_rules.replace_each_byte


@pytest.mark.parametrize("space", [" ", MARK])
def test_sentencepiece_without_a_dummy_space(space: str) -> None:
    """As in Gemma: nothing is put before the text, and user-defined runs of spaces are found first.

    Files spell these runs with spaces or with marks, depending on the converter's age.
    """
    runs = (space * 2, space * 3, "<mark>")
    metadata = spm_metadata(ALL_PIECES, runs, add_space_prefix=False, add_bos_token=False)
    tokenizer = load(metadata)
    assert [tokenizer.token_str(i) for i in tokenizer.encode("ab")] == ["ab"]
    assert [tokenizer.token_str(i) for i in tokenizer.encode("a  b<mark>")] == ["a", space * 2, "b", "<mark>"]
    assert [tokenizer.token_str(i) for i in tokenizer.encode("a   b")] == ["a", space * 3, "b"]
    assert tokenizer.decode(tokenizer.encode(" a   b")) == " a   b"
    assert not tokenizer.decode_rules.strip_leading_space
    assert not tokenizer.add_bos
    assert tokenizer.special_ids == frozenset({0, 1, 2})


def test_sentencepiece_equals_the_library(tmp_path: Any) -> None:
    library = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    words = ["the", "cat", "sat", "on", "mat", "and", "then", "another", "ran", "from", "that", "rats", "12"]
    source = random.Random(0)
    corpus.write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(200)))
    for prefix in (True, False):
        library.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(tmp_path / "m"),
            vocab_size=340,
            hard_vocab_limit=False,
            model_type="bpe",
            byte_fallback=True,
            add_dummy_prefix=prefix,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            minloglevel=2,
        )
        reference = library.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
        pieces = [reference.id_to_piece(i) for i in range(259, reference.get_piece_size())]
        tokenizer = load(spm_metadata(pieces, add_space_prefix=prefix))
        for _ in range(200):
            text = " ".join(source.choices([*words, "", "é", "漢字", "\n", "xyz"], k=source.randrange(8)))
            ids = reference.encode(text)
            assert tokenizer.encode(text, add_special_tokens=False) == ids
            assert tokenizer.decode(ids) == reference.decode(ids)


def bpe_metadata(pre: str, merges: tuple[str, ...] = (), **extra: Any) -> dict[str, Any]:
    alphabet = list(byte_level_alphabet())
    tokens = [
        *alphabet,
        *(merge.replace(" ", "") for merge in merges),
        "<|endoftext|>",
        "<|im_end|>",
        "<tool>",
    ]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": list(merges),
        **extra,
    }


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZATIONS))
def test_every_pre_tokenizer_keeps_all_text(pre: str) -> None:
    tokenizer = load(bpe_metadata(pre, merges=("Ġ t", "t h")))
    text = (
        "It's  the 1234567 Ünïcode-Zeichen!? 漢字ひらカタ한글\r\n\n\tx=[1,2]; // ok 😀<|im_end|><tool> end "
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


PIECES_OF = {
    "gpt-2": ["It", "'s", " 1234", " ", " a", "!?"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " ", " a", "!?"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " ", " a", "!?"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " ", " a", "!?"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " ", " a", "!?"],
    "gpt-4o": ["It's", " ", "123", "4", " ", " a", "!?"],
}


@pytest.mark.parametrize("pre", PIECES_OF)
def test_words_that_a_pre_tokenizer_makes(pre: str) -> None:
    alphabet = byte_level_alphabet()
    words = PRE_TOKENIZATIONS[pre].build().pre_tokenize_str("It's 1234  a!?")
    assert [bytes([alphabet[char] for char in word]).decode() for word, _ in words] == PIECES_OF[pre]


def test_bos_follows_the_file_or_else_the_pre_tokenizer() -> None:
    assert load(bpe_metadata("llama-bpe", bos_token_id=256)).encode("a")[0] == 256
    assert load(bpe_metadata("llama-bpe", bos_token_id=256, add_bos_token=False)).encode("") == []
    assert load(bpe_metadata("smollm", bos_token_id=256)).encode("") == []
    both = bpe_metadata("smollm", bos_token_id=256, eos_token_id=257, add_bos_token=True, add_eos_token=True)
    assert load(both).encode("") == [256, 257]


def test_every_end_of_generation_token_is_found() -> None:
    """Pinned: the file's own EOS first, then control tokens that are known to end a turn or a text."""
    assert load(bpe_metadata("smollm", eos_token_id=257)).eos_token_ids == (257, 256)
    tokens = [*bpe_metadata("smollm")["tokens"], "<|end|>", "<|return|>"]
    types = [*bpe_metadata("smollm")["token_type"], 3, 3]
    harmony = bpe_metadata("smollm") | {"tokens": tokens, "token_type": types, "eos_token_id": 260}
    assert load(harmony).eos_token_ids == (260, 256, 257)  # <|end|> ends a message only


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "foo"}, "'foo'.*smollm"),
        ({"model": "rwkv"}, "'rwkv'; supported: gpt2, llama"),
        ({"merges": None}, "merges is missing"),
        ({"tokens": []}, "no tokenizer"),
        ({"token_type": [1, 2]}, "different lengths"),
        ({"eos_token_id": 100000}, "eos_token_id is 100000"),
    ],
)
def test_what_cannot_be_built_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(bpe_metadata("smollm", merges=("Ġ t",)) | change)
