"""Tokenizers from directories and files, and their cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.tokenization import cache
from jaxinfer.tokenization.chat import ChatTemplateError
from jaxinfer.tokenization.decode_rules import TokenizerError, byte_level_alphabet
from jaxinfer.tokenization.gguf_vocabulary import build_tokenizer, read_vocabulary
from jaxinfer.tokenization.loading import load_gguf_tokenizer, load_tokenizer

SPECIALS = ["<s>", "</s>", "<|end|>"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "cache"))


def metadata(**extra: Any) -> dict[str, Any]:
    tokens = [*byte_level_alphabet(), *SPECIALS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        **extra,
    }


def make_directory(path: Path, **files: Any) -> Path:
    """A model directory; JSON files are given by name with ``__`` for the dot: ``config__json={...}``."""
    path.mkdir(exist_ok=True)
    backend, _ = build_tokenizer(read_vocabulary(metadata()))
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"}
    for name, content in {"tokenizer_config__json": config, **files}.items():
        merged = config | content if name == "tokenizer_config__json" else content
        (path / name.replace("__", ".")).write_text(json.dumps(merged))
    return path


def test_directory_with_tokenizer_json(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "m", tokenizer_config__json={"chat_template": "{{ eos_token }}!"})
    loaded = load_tokenizer(path)
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_ids) == (256, (257,))
    assert loaded.tokenizer.special_ids == frozenset({256, 257, 258})
    assert loaded.chat_template.render([{"role": "user", "content": "x"}]) == "</s>!"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo")) == "héllo"
    assert not (tmp_path / "cache").exists()  # nothing to convert, nothing to cache


def test_eos_ids_are_collected_from_all_configurations(tmp_path: Path) -> None:
    """Pinned: the tokenizer's own EOS first, then generation_config.json, then config.json."""
    path = make_directory(
        tmp_path / "m",
        generation_config__json={"eos_token_id": [258, 257]},
        config__json={"eos_token_id": 256},
    )
    assert load_tokenizer(path).tokenizer.eos_token_ids == (257, 258, 256)


@pytest.mark.parametrize(("add_bos", "ids"), [(True, [256]), (False, []), (None, [])])
def test_add_bos_of_the_configuration_wins(tmp_path: Path, add_bos: bool | None, ids: list[int]) -> None:
    path = make_directory(tmp_path / "m", tokenizer_config__json={"add_bos_token": add_bos})
    tokenizer = load_tokenizer(path).tokenizer
    assert tokenizer.encode("") == ids
    assert tokenizer.add_bos == bool(ids)
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_add_bos_can_be_switched_off(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "m", tokenizer_config__json={"add_bos_token": False})
    with_bos, _ = build_tokenizer(read_vocabulary(metadata(**{"tokenizer.ggml.add_bos_token": True})))
    with_bos.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).tokenizer.encode("") == []


def test_tokens_that_only_the_configuration_has(tmp_path: Path) -> None:
    entry = {"content": "<tool>", "special": False, "normalized": False}
    path = make_directory(tmp_path / "m", tokenizer_config__json={"added_tokens_decoder": {"259": entry}})
    tokenizer = load_tokenizer(path).tokenizer
    assert tokenizer.encode("a<tool>") == [*tokenizer.encode("a"), 259]
    assert tokenizer.vocab_size == 260
    assert 259 not in tokenizer.special_ids
    taken = {"260": entry}
    make_directory(path, tokenizer_config__json={"added_tokens_decoder": taken})
    with pytest.raises(TokenizerError, match="'<tool>' the id 260"):
        load_tokenizer(path)


def test_chat_templates_of_a_directory(tmp_path: Path) -> None:
    """Pinned: a file of its own wins over tokenizer_config.json."""
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    path = make_directory(tmp_path / "m", tokenizer_config__json={"chat_template": named})
    assert load_tokenizer(path).chat_template.sources == {"default": "D", "tool_use": "T"}
    (path / "chat_template.jinja").write_text("J")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load_tokenizer(path).chat_template.sources == {"default": "J", "tool_use": "T", "rag": "R"}
    make_directory(path, tokenizer_config__json={"chat_template": [{"name": "default"}]})
    with pytest.raises(TokenizerError, match="name and template"):
        load_tokenizer(path)


def test_directory_without_a_template_loads(tmp_path: Path) -> None:
    loaded = load_tokenizer(make_directory(tmp_path / "m"))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        loaded.chat_template.render([{"role": "user", "content": "x"}])


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(TokenizerError, match=r"looked for tokenizer.json, \*.gguf, tokenizer.model"):
        load_tokenizer(tmp_path)
    path = make_directory(tmp_path / "m", tokenizer_config__json={"eos_token": "<nope>"})
    with pytest.raises(TokenizerError, match=r"eos_token '<nope>' is not in the vocabulary"):
        load_tokenizer(path)
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: not valid JSON"):
        load_tokenizer(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer.json"):
        load_tokenizer(path)


def test_unsupported_decoder_is_named(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "m")
    state = json.loads((path / "tokenizer.json").read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(TokenizerError, match=r"WordPiece.*not supported"):
        load_tokenizer(path)


@pytest.mark.slow
def test_slow_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    library = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\n" * 50)
    path = tmp_path / "m"
    path.mkdir()
    library.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path / "tokenizer"),
        vocab_size=290,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    first = load_tokenizer(path).tokenizer
    assert first.decode(first.encode("the cat 漢")) == "the cat 漢"
    monkeypatch.setattr("jaxinfer.tokenization.loading.convert_slow", None)
    assert load_tokenizer(path).tokenizer.encode("the cat") == first.encode("the cat")


def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_gguf_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    path = gguf_file(tmp_path)
    reads = []

    def read(source: Path) -> dict[str, Any]:
        reads.append(source)
        template = {"tokenizer.chat_template": "D{{ bos_token }}", "tokenizer.chat_template.tool_use": "T"}
        return metadata(**template)

    for _ in range(2):
        loaded = load_gguf_tokenizer(path, read)
        assert loaded.chat_template.sources == {"default": "D{{ bos_token }}", "tool_use": "T"}
        assert loaded.chat_template.render([{"role": "user", "content": "x"}]) == "D<s>"
        assert loaded.tokenizer.eos_token_ids == (257, 258)
    assert len(reads) == 1
    path.write_bytes(b"GGUF2")
    load_gguf_tokenizer(path, read)
    assert len(reads) == 2


def test_damaged_cache_is_built_again(tmp_path: Path) -> None:
    path = gguf_file(tmp_path)
    load_gguf_tokenizer(path, lambda _: metadata())
    (cache.entry_directory(path) / "tokenizer.json").write_text("{")
    assert load_gguf_tokenizer(path, lambda _: metadata()).tokenizer.vocab_size == 259
    assert load_gguf_tokenizer(path, lambda _: {}).tokenizer.vocab_size == 259


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "file"))
    assert load_gguf_tokenizer(gguf_file(tmp_path), lambda _: metadata()).tokenizer.vocab_size == 259


def test_gguf_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"model.gguf: .*'foo'"):
        load_gguf_tokenizer(gguf_file(tmp_path), lambda _: metadata(**{"tokenizer.ggml.pre": "foo"}))


def test_directory_with_a_gguf_file(tmp_path: Path, smollm2_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x.gguf").symlink_to(smollm2_path)
    assert load_tokenizer(tmp_path / "m").tokenizer.encode("Hello") == [19556]
    shutil.rmtree(tmp_path / "cache")
