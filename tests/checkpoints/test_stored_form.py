"""Weights packed as they are stored hold the same values as weights expanded to float32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file
from tiny_gguf_files import write_gguf

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.gguf_blocks import BLOCK_LAYOUTS
from jaxinfer.checkpoints.gguf_source import GGUFSource
from jaxinfer.checkpoints.loader import load_params, num_bytes
from jaxinfer.checkpoints.safetensors_source import SafetensorsSource
from jaxinfer.checkpoints.stored_form import stored_forms
from jaxinfer.checkpoints.tensor_source import TensorSource
from jaxinfer.checkpoints.weight_map import WeightMap, concat, stack, tensor
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.linear.packed import PackedWeight, unpack

WIDTH = 512
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}
ATTENTION = "model.layers.0.self_attn."
QKV = concat(*(f"{ATTENTION}{part}_proj.weight" for part in "qkv"))
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def blocks(kind: str, rows: int, seed: int = 0) -> np.ndarray:
    """Random blocks whose scales are small finite halves."""
    block, size = GGML_QUANT_SIZES[Type[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, WIDTH // block, size), dtype=np.uint8)
    for offset in {"Q5_K": (0, 2), **{k: v.scales for k, v in BLOCK_LAYOUTS.items()}}[kind]:
        raw[:, :, offset + 1] &= 0x2F
    return raw.reshape(rows, -1)


def gguf_source(folder: Path, **tensors: tuple[np.ndarray, str]) -> GGUFSource:
    named = {f"blk.0.{name}.weight": (array, Type[kind]) for name, (array, kind) in tensors.items()}
    return GGUFSource(write_gguf(folder / "x.gguf", "llama", HEADS, named))


def qkv_source(folder: Path, q: str, k: str, v: str) -> GGUFSource:
    tensors = {
        f"attn_{n}": (blocks(kind, rows, rows), kind) for n, kind, rows in zip("qkv", (q, k, v), (16, 8, 12))
    }
    return gguf_source(folder, **tensors)


def load(
    source: TensorSource, weight_map: WeightMap, shapes: dict[str, tuple[int, ...]], dtype: np.dtype = F32
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray | PackedWeight]]:
    """The parameters in float32, and packed where that is possible; ``dtype`` as in ``stored_forms``."""
    structs = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    forms = stored_forms(structs, set(shapes), weight_map, source, dtype, tuple(FORMATS))
    expanded = load_params(structs, weight_map, source, lambda _, x: x)
    packed = load_params(structs, weight_map, source, lambda _, x: x, forms=forms)
    for path, form in forms.items():
        assert jax.tree.structure(packed[path]) == jax.tree.structure(form.struct())
        shapes_found = [leaf.shape for leaf in jax.tree.leaves(packed[path])]
        assert shapes_found == [leaf.shape for leaf in jax.tree.leaves(form.struct())]
    return expanded, packed


@pytest.mark.parametrize(
    ("q", "k", "v", "formats"),
    [
        ("Q4_0", "Q4_0", "Q4_0", ("Q4_0",)),
        ("Q4_1", "Q4_1", "Q8_0", ("Q4_1", "Q8_0")),
        ("Q5_0", "Q8_0", "Q5_0", ("Q5_0", "Q8_0", "Q5_0")),
        ("Q4_K", "Q4_K", "Q6_K", ("Q4_K", "Q6_K")),
        ("Q6_K", "Q6_K", "Q6_K", ("Q6_K",)),
        ("Q4_K", "Q5_K", "Q6_K", ("Q4_K", "f32", "Q6_K")),
    ],
)
def test_merged_blocks(tmp_path, q, k, v, formats):
    """Rows of q and k are permuted in the file; equal formats are joined, and Q5_K, which cannot be packed, is
    expanded."""
    expanded, packed = load(qkv_source(tmp_path, q, k, v), {"qkv": QKV}, {"qkv": (36, WIDTH)})
    assert packed["qkv"].formats == formats
    np.testing.assert_array_equal(unpack(packed["qkv"]), expanded["qkv"])
    assert np.unique(expanded["qkv"]).size > 100


def test_surplus_rows_of_the_vocabulary_are_dropped(tmp_path):
    named = {"token_embd.weight": (blocks("Q8_0", 70), Type.Q8_0)}
    source = GGUFSource(write_gguf(tmp_path / "x.gguf", "llama", HEADS, named))
    weight_map = {"embed.weight": tensor("model.embed_tokens.weight")}
    expanded, packed = load(source, weight_map, {"embed.weight": (65, WIDTH)})
    assert packed["embed.weight"].shape == (65, WIDTH)
    np.testing.assert_array_equal(unpack(packed["embed.weight"]), expanded["embed.weight"])


@pytest.mark.parametrize(
    ("stored", "wanted", "held"),
    [
        ("float32", F32, "f32"),
        ("bfloat16", F32, "bf16"),
        ("float16", F32, "f16"),
        ("float32", BF16, "bf16"),
        ("float16", BF16, "bf16"),
    ],
)
def test_plain_tensors(tmp_path, stored, wanted, held):
    """Nothing is lost and nothing grows, unless 16 bits are asked for."""
    dtype = np.dtype(getattr(ml_dtypes, stored, stored))
    values = np.random.default_rng(0).standard_normal((5, 40)).astype(dtype)
    save_file({"w": values}, tmp_path / "x.safetensors")
    _, packed = load(
        SafetensorsSource(tmp_path / "x.safetensors"), {"w": tensor("w")}, {"w": (5, 40)}, wanted
    )
    assert packed["w"].formats == (held,)
    expected = values.astype(BF16) if wanted == BF16 else values
    np.testing.assert_array_equal(unpack(packed["w"]), expected.astype(np.float32))


def test_what_is_no_plain_matrix_stays_an_array(tmp_path):
    values = {name: np.ones((4, 32), np.float32) for name in ("e0", "e1", "norm")}
    save_file(values, tmp_path / "x.safetensors")
    weight_map = {"experts": stack([("e0",), ("e1",)]), "norm": tensor("norm", add=1.0)}
    _, packed = load(
        SafetensorsSource(tmp_path / "x.safetensors"), weight_map, {"experts": (2, 4, 32), "norm": (4, 32)}
    )
    assert packed["experts"].shape == (2, 4, 32)
    np.testing.assert_array_equal(packed["norm"], np.full((4, 32), 2.0))


@pytest.mark.parametrize("kind", list(BLOCK_LAYOUTS))
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_bad_scales_are_an_error_that_names_the_tensor(tmp_path, kind, value):
    bad = blocks(kind, 3)
    layout = BLOCK_LAYOUTS[kind]
    scales = bad.reshape(-1, layout.size)[:, layout.scales[-1] :][:, :2]
    scales[-1] = np.array([value], np.float16).view(np.uint8)
    source = gguf_source(tmp_path, ffn_up=(bad, kind), ffn_gate=(blocks(kind, 3), kind))
    weight_map = {"w": concat("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")}
    structs = {"w": jax.ShapeDtypeStruct((6, WIDTH), jnp.float32)}
    forms = stored_forms(structs, {"w"}, weight_map, source, F32, tuple(FORMATS))
    with pytest.raises(
        CheckpointError, match=r"1 problems(.|\n)*'model.layers.0.mlp.up_proj.weight' in .*scales"
    ):
        load_params(structs, weight_map, source, lambda _, x: x, forms=forms)


def test_shapes_that_do_not_fit_are_reported(tmp_path):
    source = qkv_source(tmp_path, "Q8_0", "Q8_0", "Q8_0")
    for weight_map in ({"qkv": QKV}, {"qkv": concat("q", "k")}):
        structs = {"qkv": jax.ShapeDtypeStruct((40, WIDTH), jnp.float32)}
        assert not stored_forms(structs, {"qkv"}, weight_map, source, F32, tuple(FORMATS))
        with pytest.raises(CheckpointError):
            load_params(structs, weight_map, source, lambda _, x: x, forms={})


def test_bytes(tmp_path):
    _, packed = load(qkv_source(tmp_path, "Q4_1", "Q4_1", "Q4_1"), {"qkv": QKV}, {"qkv": (36, WIDTH)})
    assert num_bytes(packed["qkv"]) == 64 * WIDTH // 32 * 20
    assert num_bytes(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30


def test_blocks_are_for_quantized_tensors(tmp_path):
    source = gguf_source(tmp_path, ffn_up=(np.ones((2, 32), np.float32), "F16"))
    with pytest.raises(CheckpointError, match="not kept in blocks"):
        source.blocks("model.layers.0.mlp.up_proj.weight")
