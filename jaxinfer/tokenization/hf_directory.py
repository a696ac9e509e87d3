"""Tokenizer files of a Hugging Face model directory."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxinfer.tokenization.decode_rules import TokenizerError
from jaxinfer.tokenization.gguf_vocabulary import set_template
from jaxinfer.tokenization.tokenizer import SpecialTokens

SLOW_FILES = ("tokenizer.model", "vocab.json", "tekken.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file.

    Raises:
        TokenizerError: not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path}: a JSON object is needed, this is {type(data).__name__}")
    return data


def special_token_strings(directory: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ... as templates use them; tokenizer_config.json wins."""
    merged = {
        **read_json(directory / "special_tokens_map.json"),
        **read_json(directory / "tokenizer_config.json"),
    }
    named = {key: value for key, value in merged.items() if key.endswith("_token") and value}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_backend(directory: Path) -> Backend:
    """Reads tokenizer.json.

    Raises:
        TokenizerError: the file is damaged.
    """
    path = directory / "tokenizer.json"
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise TokenizerError(f"{path}: {error}") from error


def configure(backend: Backend, directory: Path) -> SpecialTokens:
    """Applies the configuration files of a directory to a tokenizer, and returns the special ids they name.

    Raises:
        TokenizerError: a file that is damaged, or names a special token outside the vocabulary.
    """
    backend.no_truncation()
    backend.no_padding()
    config = read_json(directory / "tokenizer_config.json")
    _add_configured_tokens(backend, config, directory)
    special = _special_tokens(backend, directory)
    _apply_add_bos(backend, special, config.get("add_bos_token"))
    return special


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Chat templates by name; the plain one is ``default``. Files of their own win over
    tokenizer_config.json.

    Raises:
        TokenizerError: a template that is not text, or a list entry without name and template.
    """
    configured: Any = read_json(directory / "tokenizer_config.json").get("chat_template")
    configured = read_json(directory / "chat_template.json").get("chat_template", configured)
    entries: list[dict[str, Any]] = (
        configured if isinstance(configured, list) else [{"name": "default", "template": configured}]
    )
    try:
        templates: dict[str, Any] = {
            entry["name"]: entry["template"] for entry in entries if entry["template"] is not None
        }
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"{directory}: each entry of chat_template needs name and template") from error
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    templates.update({name: path.read_text(encoding="utf-8") for name, path in files.items()})
    for name, text in templates.items():
        if not isinstance(text, str):
            raise TokenizerError(
                f"{directory}: chat template {name!r} is {type(text).__name__}, text is needed"
            )
    return templates


def convert_slow(directory: Path) -> Backend:
    """Converts the files of a slow tokenizer; the one place that needs transformers (and sentencepiece).

    Raises:
        TokenizerError: transformers is not installed, or cannot convert it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{directory} has no tokenizer.json; converting its tokenizer needs the packages "
            "transformers and sentencepiece"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
    except Exception as error:  # the conversion runs much code of others
        raise TokenizerError(f"{directory}: transformers cannot convert the tokenizer: {error}") from error


def _add_configured_tokens(backend: Backend, config: dict[str, Any], directory: Path) -> None:
    known = backend.get_added_tokens_decoder()
    entries = config.get("added_tokens_decoder", {})
    for token_id, entry in sorted((int(key), value) for key, value in entries.items()):
        if token_id in known:
            continue
        flags = {
            key: bool(entry.get(key, False))
            for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != token_id:
            raise TokenizerError(
                f"{directory}: tokenizer_config.json gives {entry['content']!r} the id {token_id}, "
                "which is taken"
            )


def _special_tokens(backend: Backend, directory: Path) -> SpecialTokens:
    texts = special_token_strings(directory)
    ids = {name: backend.token_to_id(texts[name]) for name in ("bos_token", "eos_token") if name in texts}
    for name, token_id in ids.items():
        if token_id is None:
            raise TokenizerError(f"{directory}: {name} {texts[name]!r} is not in the vocabulary")
    added = backend.get_added_tokens_decoder()
    hidden = [
        texts[name] for name, token_id in ids.items() if token_id not in added or not added[token_id].special
    ]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in hidden])
    config, generation = (read_json(directory / name) for name in ("config.json", "generation_config.json"))
    text_config = config.get("text_config") or {}
    configured = [source.get("eos_token_id") for source in (generation, config, text_config)]
    ends = [ids.get("eos_token"), *(token_id for value in configured for token_id in _as_ids(value))]
    return SpecialTokens(ids.get("bos_token"), tuple(dict.fromkeys(i for i in ends if i is not None)))


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _apply_add_bos(backend: Backend, special: SpecialTokens, add_bos: bool | None) -> None:
    """``add_bos_token`` in the configuration overrides what the post-processor of tokenizer.json does."""
    if add_bos is None or special.bos_token_id is None:
        return
    ids = backend.encode("").ids
    if add_bos == (ids[:1] == [special.bos_token_id]):
        return
    end = (
        special.eos_token_ids[0] if special.eos_token_ids and ids[-1:] == [special.eos_token_ids[0]] else None
    )
    if add_bos or end is not None:
        set_template(backend, special.bos_token_id if add_bos else None, end)
    else:
        backend.post_processor = None
