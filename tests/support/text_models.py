"""A tiny random model with a real tokenizer, as a Hugging Face directory that any client can read."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxinfer.config import EngineConfig
from tests.models.tiny_checkpoints import VOCAB, save

SPECIALS = ["<pad>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "it is the question that the answer asks",
    "Question: what is this? Answer: that is the thing",
]


def save_text_model(folder: Path, max_model_len: int = 512) -> None:
    """Writes a Llama of two layers with random float32 weights, a byte-level BPE tokenizer of 320 tokens without BOS,
    and a chat template."""
    save("llama", folder, max_position_embeddings=max_model_len)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def text_model_config(folder: Path, **overrides: object) -> EngineConfig:
    """Settings for it: few shapes, compiled at first use; ``overrides`` by bare field name."""
    values = {
        "model.dtype": "float32",
        "cache.block_size": 16,
        "cache.num_blocks": 257,
        "scheduler.max_num_seqs": 8,
        "scheduler.max_num_batched_tokens": 64,
        "compile.warm_up": "lazy",
        "compile.cache_dir": "none",
        "server.host": "127.0.0.1",
    }
    return EngineConfig.load(str(folder), {**values, **overrides})
