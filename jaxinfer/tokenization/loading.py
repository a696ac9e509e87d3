"""Loads the tokenizer and the chat template of a model: a Hugging Face directory, or a GGUF file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxinfer.checkpoints.gguf_metadata import read_gguf_metadata
from jaxinfer.tokenization import cache
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.decode_rules import TokenizerError
from jaxinfer.tokenization.gguf_vocabulary import build_tokenizer, read_vocabulary
from jaxinfer.tokenization.hf_directory import (
    SLOW_FILES,
    configure,
    convert_slow,
    read_backend,
    read_chat_templates,
    special_token_strings,
)
from jaxinfer.tokenization.tokenizer import HFTokenizer, SpecialTokens

_TEMPLATE_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class LoadedTokenizer:
    """What a model's files say about text.

    Attributes:
        chat_template: always there; a model without a template has one that raises when it is used.
    """

    tokenizer: HFTokenizer
    chat_template: ChatTemplate


def load_text(path: Path | None) -> tuple[HFTokenizer | None, ChatTemplate]:
    """Tokenizer and chat template; without a path no tokenizer, and a template that raises when it is used."""
    if path is None:
        return None, ChatTemplate({})
    loaded = load_tokenizer(path)
    return loaded.tokenizer, loaded.chat_template


def load_tokenizer(path: Path | str) -> LoadedTokenizer:
    """Loads a tokenizer from a GGUF file, or from a directory with tokenizer.json, one GGUF file, or the
    files of a slow tokenizer (which needs transformers to convert them).

    What is built from another format than tokenizer.json is cached under ``cache.cache_root()``.

    Raises:
        TokenizerError: no tokenizer there, or one that is not supported.
        CheckpointError: a damaged GGUF file.
    """
    path = Path(path)
    if path.is_file():
        return load_gguf_tokenizer(path)
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such file or directory")
    if (path / "tokenizer.json").is_file():
        return _from_directory(path, read_backend(path))
    gguf_files = sorted(path.glob("*.gguf"))
    if gguf_files:
        return load_gguf_tokenizer(gguf_files[0])
    slow = [path / name for name in SLOW_FILES if (path / name).is_file()]
    if not slow:
        looked_for = ", ".join(["tokenizer.json", "*.gguf", *SLOW_FILES])
        raise TokenizerError(f"{path}: no tokenizer; looked for {looked_for}")
    return _from_directory(path, _converted(path, slow[0]))


def save_tokenizer(loaded: LoadedTokenizer, directory: Path) -> None:
    """Writes tokenizer and chat templates as the files of a Hugging Face directory, which must exist."""
    loaded.tokenizer.backend.save(str(directory / "tokenizer.json"))
    templates = [{"name": name, "template": text} for name, text in loaded.chat_template.sources.items()]
    config = {**loaded.chat_template.special_tokens, "chat_template": templates}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def load_gguf_tokenizer(
    path: Path, read_metadata: Callable[[Path], dict[str, Any]] = read_gguf_metadata
) -> LoadedTokenizer:
    """Loads the tokenizer in a GGUF file. ``read_metadata`` is not called when the cache has it.

    Raises:
        TokenizerError: the file has no tokenizer, or one that is not supported.
        CheckpointError: a damaged file.
    """
    directory = cache.entry_directory(path)
    entry = cache.read_entry(directory)
    if entry is None:
        entry = _build_gguf(path, read_metadata(path))
        cache.write_entry(directory, *entry)
    backend, extra = entry
    special = SpecialTokens(extra["bos_token_id"], tuple(extra["eos_token_ids"]))
    return LoadedTokenizer(
        HFTokenizer(backend, special), ChatTemplate(extra["chat_templates"], extra["special_tokens"])
    )


def _build_gguf(path: Path, metadata: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    try:
        vocabulary = read_vocabulary(metadata)
        backend, special = build_tokenizer(vocabulary)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": text
        for key, text in metadata.items()
        if key.startswith(prefix)
    }
    templates = {name: text for name, text in templates.items() if isinstance(text, str)}
    named = {
        f"{name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in _TEMPLATE_TOKENS.items()
    }
    return backend, {
        "bos_token_id": special.bos_token_id,
        "eos_token_ids": list(special.eos_token_ids),
        "chat_templates": templates,
        "special_tokens": {name: backend.id_to_token(i) for name, i in named.items() if i is not None},
    }


def _from_directory(path: Path, backend: Backend) -> LoadedTokenizer:
    special = configure(backend, path)
    template = ChatTemplate(read_chat_templates(path), special_token_strings(path))
    return LoadedTokenizer(HFTokenizer(backend, special), template)


def _converted(path: Path, source: Path) -> Backend:
    directory = cache.entry_directory(source)
    entry = cache.read_entry(directory)
    if entry is None:
        entry = (convert_slow(path), {})
        cache.write_entry(directory, *entry)
    return entry[0]
