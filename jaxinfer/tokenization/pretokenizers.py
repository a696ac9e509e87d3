"""How byte-level BPE vocabularies split text into words first, by the name that GGUF files give.

The expressions are those of the models' published tokenizer.json files; GGUF files name them by
``tokenizer.ggml.pre``.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxinfer.tokenization.decode_rules import TokenizerError


@dataclass(frozen=True)
class PreTokenization:
    """Attributes:
    patterns: applied one after the other; each isolates its matches within the pieces of those before it.
    ignore_merges: a word that is a token is not built by merges.
    add_bos: whether BOS comes first when the file does not say.
    nfc: text is normalized to NFC.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?"
    + _UPPER
    + "*"
    + _LOWER
    + "+{suffix}|"
    + (r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*{suffix}|")
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = _CASED.replace("{suffix}", "") + r"\p{N}" + _CASED_TAIL
_GPT4O = _CASED.replace("{suffix}", _SUFFIX + "?") + r"\p{N}{1,3}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_CJK_HANGUL = r"[一-龥ࠀ-一가-퟿]+"

_STARCODER = PreTokenization((r"\p{N}", _GPT2))
_GPT2_ONLY = PreTokenization((_GPT2,))
_LLAMA3_BOS = PreTokenization((_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "modern-bert", "mellum"), _GPT2_ONLY
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _STARCODER
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), _LLAMA3_BOS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenization((_LLAMA3,))),
    "qwen2": PreTokenization((_QWEN2,), nfc=True),
    **dict.fromkeys(
        ("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "grok-2"), PreTokenization((_QWEN2,))
    ),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenization((_GPT4O,))),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")),
    "deepseek-v3": PreTokenization((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "hunyuan-dense": PreTokenization((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenization((_BAILING,))),
}


def pre_tokenization(name: str) -> PreTokenization:
    """The splitting rules called ``name``.

    Raises:
        TokenizerError: an unknown name; guessing would give other ids than the model was trained on.
    """
    if name not in PRE_TOKENIZATIONS:
        known = ", ".join(sorted(PRE_TOKENIZATIONS))
        raise TokenizerError(f"tokenizer.ggml.pre is {name!r}, which is not known; known: {known}")
    return PRE_TOKENIZATIONS[name]
