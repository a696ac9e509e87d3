import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tiny_gguf_files import convert
from tiny_llama_files import hf_logits, load, make_model, our_logits
from transformers import LlamaForCausalLM

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.model_files import open_model
from jaxinfer.checkpoints.orbax_format import save_checkpoint


def rewrite(path, **changes) -> None:
    """Updates a JSON file; None removes a key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_sharded_checkpoints_of_every_dtype(tmp_path, dtype, tied):
    model = make_model(tie_word_embeddings=tied).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype="float32")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    files = open_model(tmp_path)
    assert files.kind == "safetensors"
    assert files.tokenizer_path == tmp_path
    np.testing.assert_allclose(our_logits(tmp_path), hf_logits(reference), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_lod_01_gguf_model(tmp_path, tied):
    """A GGUF file without an output tensor has tied embeddings; the logits are its model's."""
    model = make_model(tie_word_embeddings=tied)
    path = convert(tmp_path / "m.gguf", "llama", model)
    files = open_model(path)
    assert (files.kind, files.tokenizer_path, files.tokenizer_files) == ("gguf", path, ())
    np.testing.assert_allclose(our_logits(path), hf_logits(model), atol=1e-4)
    np.testing.assert_array_equal(our_logits(tmp_path), our_logits(path))


@pytest.mark.parametrize(
    ("arch", "architecture", "options", "extra"),
    [
        ("qwen2", "Qwen2", {"tie_word_embeddings": True}, {}),
        (
            "qwen3moe",
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
            {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
        ),
        (
            "gemma3",
            "Gemma3Text",
            {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "tie_word_embeddings": True},
            {"attention.sliding_window": 5, "rope.freq_base": 1e6},
        ),
        ("phi3", "Phi3", {}, {}),
    ],
)
def test_logits_of_gguf_models(tmp_path, arch, architecture, options, extra):
    model = make_model(architecture, **options)
    path = convert(tmp_path / "m.gguf", arch, model, extra=extra)
    np.testing.assert_allclose(our_logits(path), hf_logits(model), atol=3e-4)


def test_quantized_gguf_is_close(tmp_path):
    model = make_model()
    path = convert(tmp_path / "m.gguf", "llama", model, Type.Q8_0)
    ours, reference = our_logits(path), hf_logits(model)
    assert 1e-5 < np.abs(ours - reference).max() < 0.1 * reference.std()


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, [2]),
        (2, [2, 7], [2, 7]),
        ([5, 2], 7, [5, 2, 7]),
        (None, 7, [7]),
        (None, None, []),
    ],
)
def test_end_tokens_of_both_configurations(tmp_path, config, generation, expected):
    make_model().save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", eos_token_id=config)
    rewrite(tmp_path / "generation_config.json", eos_token_id=generation, temperature=0.6)
    files = open_model(tmp_path)
    assert files.config["eos_token_id"] == expected
    assert files.generation_config["temperature"] == 0.6


def test_end_tokens_of_a_nested_configuration(tmp_path):
    make_model().save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", eos_token_id=None, text_config={"eos_token_id": 9})
    (tmp_path / "generation_config.json").unlink()
    files = open_model(tmp_path)
    assert files.config["eos_token_id"] == [9]
    assert files.config["text_config"] == {"eos_token_id": [9]}
    assert files.generation_config == {}


@pytest.mark.parametrize("value", ["2", [2, "x"], True, [-1], 1.5])
def test_malformed_end_tokens(tmp_path, value):
    make_model().save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token id"):
        open_model(tmp_path)


def test_directories_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match="no weights: looked for"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it holds \['pytorch_model.bin'\]"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"a directory or a \.gguf file"):
        open_model(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no such file"):
        open_model(tmp_path / "nothing")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF models; name one: \['a.gguf', 'b.gguf'\]"):
        open_model(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "a JSON object is needed")])
def test_malformed_configuration(tmp_path, text, message):
    make_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        open_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: No such file"):
        open_model(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_own_format_is_a_model_like_any_other(tmp_path, dtype):
    original, saved = tmp_path / "hf", tmp_path / "own"
    make_model().save_pretrained(original)
    (original / "tokenizer.json").write_text("{}")
    files = open_model(original)
    _, params = load(files, dtype)
    save_checkpoint(saved, params, files.config, files.generation_config, files.tokenizer_files)
    shutil.rmtree(original)

    reopened = open_model(saved)
    assert reopened.kind == "orbax"
    assert reopened.config == files.config
    assert reopened.generation_config == files.generation_config
    assert [file.name for file in reopened.tokenizer_files] == ["tokenizer.json"]
    _, again = load(reopened, dtype)
    assert again.keys() == params.keys()
    for path, array in params.items():
        assert again[path].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(again[path]), np.asarray(array), err_msg=path)


def test_own_format_reports_what_is_missing(tmp_path):
    params = {"embed.weight": jnp.ones((3, 4)), "strange": jnp.ones(2)}
    make_model().save_pretrained(tmp_path / "hf")
    save_checkpoint(tmp_path / "own", params, open_model(tmp_path / "hf").config)
    with pytest.raises(CheckpointError) as error:
        load(open_model(tmp_path / "own"))
    text = str(error.value)
    for part in (
        "'strange'",
        "'final_norm.weight' is missing in",
        "'embed.weight' has shape [320, 64]",
        "own/params",
    ):
        assert part in text


def test_own_format_is_written_to_a_new_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        save_checkpoint(tmp_path, {"a": jnp.ones(2)}, {})
    with pytest.raises(CheckpointError, match=r"m.gguf: not a tokenizer file"):
        save_checkpoint(tmp_path / "new", {"a": jnp.ones(2)}, {}, tokenizer_files=[tmp_path / "m.gguf"])
    assert not (tmp_path / "new").exists()


def test_incomplete_own_checkpoint(tmp_path):
    (tmp_path / "params").mkdir()
    with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
        open_model(tmp_path)
