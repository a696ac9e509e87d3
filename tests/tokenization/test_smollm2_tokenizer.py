"""The default model's tokenizer, against ids computed with transformers and against full decodes."""

import json
import random
import time
from pathlib import Path

import pytest

from jaxinfer.tokenization import cache
from jaxinfer.tokenization.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenization.loading import LoadedTokenizer, load_gguf_tokenizer, load_tokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Ids of the whole prompt, as transformers' apply_chat_template gives them.
PROMPTS = {
    "What is the capital of France?": [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
    "Write a short poem about the sea.": [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        19161,
        253,
        1890,
        8216,
        563,
        260,
        3426,
        30,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
    "Explain in two sentences why the sky is blue.": [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        36971,
        281,
        827,
        8545,
        1701,
        260,
        6376,
        314,
        4461,
        30,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
}
TEXTS = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


@pytest.mark.parametrize("user", PROMPTS)
def test_chat_prompt_equals_the_reference(smollm2: LoadedTokenizer, user: str) -> None:
    text = smollm2.chat_template.render([{"role": "user", "content": user}])
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.tokenizer.encode(text, add_special_tokens=False) == PROMPTS[user]
    assert smollm2.tokenizer.decode(PROMPTS[user], skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text(smollm2: LoadedTokenizer, text: str) -> None:
    assert smollm2.tokenizer.encode(text) == TEXTS[text]
    assert smollm2.tokenizer.decode(TEXTS[text]) == text


def test_special_tokens(smollm2: LoadedTokenizer) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos) == (1, (2, 0), False)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert (tokenizer.token_str(260), tokenizer.token_bytes(260)) == ("Ġthe", b" the")


def test_ids_outside_the_vocabulary_decode_to_nothing(smollm2: LoadedTokenizer) -> None:
    for token_id in (-1, 49152, 2**40):
        assert smollm2.tokenizer.decode([token_id, 260]) == " the"
        assert smollm2.tokenizer.token_bytes(token_id) == b""
        assert smollm2.tokenizer.token_str(token_id) == ""


def test_lone_surrogates_do_not_raise(smollm2: LoadedTokenizer) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("a\ud83d\ude00") == tokenizer.encode("a😀")
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a\ufffd")


@pytest.mark.parametrize("seed", range(50))
def test_det_06_random_ids_equal_the_full_decode(smollm2: LoadedTokenizer, seed: int) -> None:
    tokenizer = smollm2.tokenizer
    source = random.Random(seed)
    ids = [source.randrange(49152) for _ in range(200)]
    ids += tokenizer.encode("déjà vu 漢字 😀 <|im_end|> x")
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        text = "".join([detokenizer.append(ids[start : start + 3]) for start in range(0, len(ids), 3)])
        assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_det_06_a_completion_adds_what_the_full_decode_adds(smollm2: LoadedTokenizer) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode("Déjà vu: 漢字 and 😀😀 emoji, then  spaces.\n\nEnd")
    for border in range(len(ids)):
        prompt, output = ids[:border], ids[border:]
        if "\ufffd" in tokenizer.decode(prompt):
            continue  # ends inside a character: test_det_01
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        text = "".join([detokenizer.append([token_id]) for token_id in output]) + detokenizer.finish()
        assert text == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]


def test_token_bytes_concatenate_to_the_text(smollm2: LoadedTokenizer) -> None:
    text = "naïve 漢字 😀 \x00\t end"
    ids = smollm2.tokenizer.encode(text)
    assert b"".join(smollm2.tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_the_written_tokenizer_gives_transformers_the_same_ids(
    smollm2: LoadedTokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    smollm2.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    reference.chat_template = smollm2.chat_template.sources["default"]
    conversations = [
        [{"role": "user", "content": "Hi 漢字 <|im_end|> 12"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "a\r\n b"}],
        [{"role": role, "content": role} for role in ("user", "assistant", "user")],
    ]
    for messages in conversations:
        for prompt in (True, False):
            expected = reference.apply_chat_template(
                messages, add_generation_prompt=prompt, return_dict=False
            )
            text = smollm2.chat_template.render(messages, add_generation_prompt=prompt)
            assert smollm2.tokenizer.encode(text, add_special_tokens=False) == expected


def test_second_start_reads_the_cache(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path))
    first = load_tokenizer(smollm2_path)

    def unused(path: Path) -> dict[str, object]:
        raise AssertionError("the vocabulary was read again")

    def load() -> tuple[float, LoadedTokenizer]:
        start = time.perf_counter()
        loaded = load_gguf_tokenizer(smollm2_path, read_metadata=unused)
        return time.perf_counter() - start, loaded

    seconds, second = min((load() for _ in range(3)), key=lambda result: result[0])
    assert seconds < 1.0  # 0.1-0.2 s on an idle machine
    assert second.tokenizer.encode("Hello world! 123") == first.tokenizer.encode("Hello world! 123")
    assert second.tokenizer.eos_token_ids == first.tokenizer.eos_token_ids
    assert second.chat_template.sources == first.chat_template.sources
    entry = cache.entry_directory(smollm2_path)
    assert json.loads((entry / "extra.json").read_text())["eos_token_ids"] == [2, 0]
