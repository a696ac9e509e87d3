import ml_dtypes
import numpy as np
import pytest
import transformers
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from tiny_gguf_files import TOKENIZER, convert, hugging_face_tensors, write_gguf
from tiny_llama_files import make_model

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_source import GGUFSource

HEADS = {"attention.head_count": 2, "attention.head_count_kv": 1}
UP = "model.layers.0.mlp.up_proj.weight"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS = {
    "llama": ("Llama", {"head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3moe": ("Qwen3Moe", MOE),
    "gemma2": ("Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def random_blocks(kind: Type, rows: int, width: int) -> np.ndarray:
    """Valid blocks of any quantized type: random bits, but scales that are finite in half precision."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (rows, width // block * size), dtype=np.uint8)
    # A half whose high byte is below 0x7c is finite; no byte of the block may be more where a scale could be.
    return raw & 0x3B


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types_are_read_as_stored(tmp_path, kind):
    values = random(6, 40)
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, {"blk.0.ffn_up.weight": (values, Type[kind])})
    source = GGUFSource(path)
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
    info = source.info(UP)
    assert (info.shape, info.dtype, info.stored, info.quantized) == ((6, 40), np.dtype(dtype), kind, False)
    np.testing.assert_array_equal(source.read(UP), values.astype(dtype))
    np.testing.assert_array_equal(np.concatenate(list(source.chunks(UP))), values.astype(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_quantized_types(tmp_path, kind):
    raw = random_blocks(Type[kind], rows=1200, width=512)
    expected = quants.dequantize(raw, Type[kind])
    assert np.isfinite(expected).all()
    assert np.unique(expected).size > 10
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, {"blk.0.ffn_up.weight": (raw, Type[kind])})
    source = GGUFSource(path)
    info = source.info(UP)
    assert (info.shape, info.dtype, info.stored, info.quantized) == ((1200, 512), np.dtype("f4"), kind, True)
    np.testing.assert_array_equal(source.read(UP), expected)
    blocks = list(source.chunks(UP))
    assert len(blocks) > 1
    np.testing.assert_array_equal(np.concatenate(blocks), expected)


@pytest.mark.parametrize("arch", MODELS)
def test_tensors_are_those_of_the_hugging_face_checkpoint(tmp_path, arch):
    architecture, options = MODELS[arch]
    model = make_model(architecture, **options)
    source = GGUFSource(convert(tmp_path / "x.gguf", arch, model))
    expected = hugging_face_tensors(model)
    assert set(source.names()) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(source.read(name), array, atol=3e-7, err_msg=name)
        np.testing.assert_allclose(np.concatenate(list(source.chunks(name))), array, atol=3e-7, err_msg=name)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "gemma3"])
def test_tensors_are_what_transformers_reads(tmp_path, arch):
    architecture, options = MODELS[arch]
    path = convert(tmp_path / "x.gguf", arch, make_model(architecture, **options), Type.Q8_0)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype="float32")
    source = GGUFSource(path)
    for name, array in hugging_face_tensors(other).items():
        if name in source.names():
            np.testing.assert_allclose(source.read(name), array, atol=3e-7, err_msg=name)
    assert set(source.names()) - set(hugging_face_tensors(other)) == set()


def test_biases_of_permuted_rows(tmp_path):
    model = make_model(attention_bias=True)
    source = GGUFSource(convert(tmp_path / "x.gguf", "llama", model))
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(source.read(name), hugging_face_tensors(model)[name])


def test_split_files(tmp_path):
    tensors = {f"blk.{i}.ffn_up.weight": (random(4, 32) + i, Type.F32) for i in range(2)}
    for i, (name, tensor) in enumerate(tensors.items()):
        metadata = {**(HEADS if i == 0 else {}), "split.no": i, "split.count": 2}
        write_gguf(tmp_path / f"m-0000{i + 1}-of-00002.gguf", "llama", metadata, {name: tensor})
    source = GGUFSource(tmp_path / "m-00001-of-00002.gguf")
    np.testing.assert_array_equal(source.read("model.layers.1.mlp.up_proj.weight"), random(4, 32) + 1)
    assert "m-00002-of-00002.gguf" in source.origin("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"parts are missing: \['m-00002-of-00002.gguf'\]"):
        GGUFSource(tmp_path / "m-00001-of-00002.gguf")


def test_second_part_alone_is_an_error(tmp_path):
    metadata = {**HEADS, "split.no": 1, "split.count": 2}
    path = write_gguf(tmp_path / "m-00002-of-00002.gguf", "llama", metadata, {})
    with pytest.raises(CheckpointError, match=r"not the first of 2 parts; open m-00001-of-00002.gguf"):
        GGUFSource(path)


def test_truncated_data_names_file_and_tensor(tmp_path):
    tensors = {f"blk.{i}.ffn_up.weight": (random(8, 32), Type.F32) for i in range(2)}
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, tensors)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"x.gguf: truncated: tensor 'blk.1.ffn_up.weight'"):
        GGUFSource(path)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_NL", "I32"])
def test_types_that_are_not_read(tmp_path, kind):
    raw = np.zeros((4, GGML_QUANT_SIZES[Type[kind]][1]), np.uint8)
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, {"w": (raw, Type[kind])})
    with pytest.raises(CheckpointError, match=f"'w' has type {kind}; readable are F32, .*Q6_K"):
        GGUFSource(path)


def test_unknown_tensors_keep_their_name(tmp_path):
    """The loader then reports them as belonging to no parameter."""
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, {"blk.0.odd.weight": (random(2, 2), Type.F32)})
    assert GGUFSource(path).names() == ("blk.0.odd.weight",)


def test_unsupported_architecture(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "mamba", TOKENIZER, {})
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not supported; supported are llama"):
        GGUFSource(path)


@pytest.mark.parametrize("heads", [{}, {"attention.head_count": 0}, {"attention.head_count": [2, 3]}])
def test_head_counts_are_needed(tmp_path, heads):
    path = write_gguf(tmp_path / "x.gguf", "llama", heads, {})
    with pytest.raises(CheckpointError, match=r"llama.attention.head_count"):
        GGUFSource(path)


def test_rows_that_are_no_whole_heads(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "llama", HEADS, {"blk.0.attn_q.weight": (random(6, 32), Type.F32)})
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_q.weight': \[6, 32\] are not 2 heads"):
        GGUFSource(path)
