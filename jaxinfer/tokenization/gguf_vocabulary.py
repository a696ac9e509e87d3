"""Builds a ``tokenizers`` object from the vocabulary in the metadata of a GGUF file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from jaxinfer.tokenization.decode_rules import SPACE_MARK, TokenizerError
from jaxinfer.tokenization.pretokenizers import pre_tokenization
from jaxinfer.tokenization.tokenizer import SpecialTokens

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Files name one EOS token, chat models end a turn with another; control tokens of these names end a
# generation.
_END_OF_GENERATION = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
    "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>",
    "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|end_of_turn|>",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFVocabulary:
    """The entries ``tokenizer.*`` of a file's metadata that are used here, checked."""

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    bos: int | None
    eos: tuple[int, ...]
    unknown: int | None
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


def read_vocabulary(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Picks the vocabulary out of GGUF metadata.

    Raises:
        TokenizerError: no vocabulary, lists of different lengths, or special ids outside it.
    """

    def entry(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens = entry("tokens")
    if not tokens or not entry("model"):
        raise TokenizerError(
            "the file has no tokenizer: tokenizer.ggml.model or tokenizer.ggml.tokens is missing"
        )
    types = entry("token_type") or [_NORMAL] * len(tokens)
    scores = entry("scores") or [0.0] * len(tokens)
    if not len(tokens) == len(types) == len(scores):
        raise TokenizerError(
            "tokenizer.ggml.tokens, token_type and scores have different lengths: "
            f"{len(tokens)}, {len(types)}, {len(scores)}"
        )
    special = {name: entry(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown")}
    for name, token_id in special.items():
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{name}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens"
            )
    ends = [special[name] for name in ("eos", "eot", "eom") if special[name] is not None]
    ends += _named_ends(tokens, types)
    return GGUFVocabulary(
        model=entry("model"),
        pre=entry("pre", "default"),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=entry("merges"),
        bos=special["bos"],
        eos=tuple(dict.fromkeys(ends)),
        unknown=special["unknown"],
        add_bos=entry("add_bos_token"),
        add_eos=bool(entry("add_eos_token", False)),
        add_space_prefix=bool(entry("add_space_prefix", True)),
    )


def _named_ends(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    found = {
        token: i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_GENERATION
    }
    if "<|return|>" in found:  # the harmony format, where <|end|> ends a message within a generation
        found.pop("<|end|>", None)
    return list(found.values())


def build_tokenizer(vocabulary: GGUFVocabulary) -> tuple[Backend, SpecialTokens]:
    """Builds the tokenizer of a GGUF vocabulary.

    Raises:
        TokenizerError: a kind of tokenizer, or of pre-tokenizer, that is not supported.
    """
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if vocabulary.model not in builders:
        supported = ", ".join(builders)
        raise TokenizerError(f"tokenizer.ggml.model is {vocabulary.model!r}; supported: {supported}")
    backend, add_bos_default = builders[vocabulary.model](vocabulary)
    add_bos = add_bos_default if vocabulary.add_bos is None else vocabulary.add_bos
    set_template(
        backend, vocabulary.bos if add_bos else None, vocabulary.eos[0] if vocabulary.add_eos else None
    )
    return backend, SpecialTokens(vocabulary.bos, vocabulary.eos)


def set_template(backend: Backend, bos: int | None, eos: int | None) -> None:
    """Makes ``encode`` put BOS before and EOS behind the text; ``None`` leaves that one out."""
    used = {backend.id_to_token(token_id): token_id for token_id in (bos, eos) if token_id is not None}
    first = [f"{backend.id_to_token(bos)}:0"] if bos is not None else []
    last = [f"{backend.id_to_token(eos)}:0"] if eos is not None else []
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A:0", *last],
            pair=[*first, "$A:0", *last, "$B:1"],
            special_tokens=list(used.items()),
        )


def _added_tokens(vocabulary: GGUFVocabulary, normalized: bool) -> list[AddedToken]:
    """Tokens that are found in the text before anything else: control tokens, and user-defined symbols."""
    special = {_CONTROL, _UNKNOWN}
    return [
        AddedToken(token, special=kind in special, normalized=normalized and SPACE_MARK in token)
        for token, kind in zip(vocabulary.tokens, vocabulary.types)
        if token and (kind in special or (kind == _USER_DEFINED and (normalized or SPACE_MARK not in token)))
    ]


def _byte_level_bpe(vocabulary: GGUFVocabulary) -> tuple[Backend, bool]:
    """GPT-2's BPE over bytes."""
    rules = pre_tokenization(vocabulary.pre)
    if vocabulary.merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing, and a BPE tokenizer needs it")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    model = models.BPE(vocab=vocabulary.ids, merges=merges, fuse_unk=False, ignore_merges=rules.ignore_merges)
    backend = Backend(model)
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(vocabulary, normalized=False))
    return backend, rules.add_bos


def _sentencepiece_bpe(vocabulary: GGUFVocabulary) -> tuple[Backend, bool]:
    """SentencePiece's BPE: the neighbours whose union has the best score are merged first.

    Scores become merges: each token may be built of any two tokens that spell it, better scores first. This
    is the same as merging by score while no two tokens have one score, and single characters outside the
    vocabulary are spelled in bytes. Spaces are kept as they are; a dummy space is put before the text, and
    behind special tokens, if the file says so.
    """
    ids, unknown = vocabulary.ids, vocabulary.unknown
    model = models.BPE(
        vocab=ids,
        merges=list(_merges_by_score(vocabulary, ids)),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    mark = [normalizers.Prepend(SPACE_MARK)] if vocabulary.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*mark, normalizers.Replace(" ", SPACE_MARK)])
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=1, right=0)] if vocabulary.add_space_prefix else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    # With a dummy space, the backend would look for "mark + token"; those tokens are left to the merges.
    backend.add_tokens(_added_tokens(vocabulary, normalized=not vocabulary.add_space_prefix))
    return backend, True


def _merges_by_score(vocabulary: GGUFVocabulary, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    usable = {_NORMAL, _USER_DEFINED, _UNUSED}
    pieces = [
        i for i, kind in enumerate(vocabulary.types) if kind in usable and len(vocabulary.tokens[i]) > 1
    ]
    pieces.sort(key=lambda i: (-vocabulary.scores[i], i))
    for token_id in pieces:
        token = vocabulary.tokens[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                yield left, right
