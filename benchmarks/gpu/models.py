"""Models of known shapes with random weights. Import it after ``stand_ins.install``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.timing import nbytes
from jaxinfer.kv_cache.layout import KVCache, LayerKV, group_layers
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import parse_config
from jaxinfer.models.segments import SegmentedModel, segmented_model
from pallas_kernels.gpus import Generation
from pallas_kernels.kv_storage import storage_dtype
from pallas_kernels.ops import Ops
from pallas_kernels.select import select_ops

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048

_COMMON: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 8192, "num_key_value_heads": 8}
LLAMA3_8B: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_06B: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = LLAMA3_8B | {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Attributes:
        hf: fields of its ``config.json``.
        layers_per_segment: divides the number of layers, so that all segments share their programs.
    """

    name: str
    hf: Mapping[str, Any]
    layers_per_segment: int
    dtype: str = "bfloat16"


def shapes(smoke: bool) -> tuple[Shape, ...]:
    """The models in the order in which they are measured."""
    if smoke:
        return (Shape("tiny", TINY, 1, "float32"),)
    return (Shape("qwen3-0.6b", QWEN3_06B, 4), Shape("llama3-8b", LLAMA3_8B, 4))


@dataclass(frozen=True)
class Model:
    """A model with one choice of ops, without weights.

    Attributes:
        weight_bytes: of all parameters that a token passes; an untied embedding is looked up, not read.
        token_bytes: of K and V of a token, in all layers.
        groups: KV group of each layer.
    """

    name: str
    config: TransformerConfig
    ops: Ops
    parts: SegmentedModel
    dtype: jnp.dtype
    weight_bytes: int
    token_bytes: int
    groups: tuple[int, ...]

    @classmethod
    def make(cls, shape: Shape, ops: Ops) -> "Model":
        config, dtype = parse_config(shape.hf), jnp.dtype(shape.dtype)
        parts = segmented_model(
            config,
            ops,
            dtype,
            param_dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            layers_per_segment=shape.layers_per_segment,
        )
        looked_up = set() if config.tie_word_embeddings else set(parts.embed_paths)
        read = [x for path, x in parts.shapes.items() if path not in looked_up]
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        _, groups = group_layers(kv_specs(config))
        return cls(shape.name, config, ops, parts, dtype, nbytes(read), token, groups)

    def leaves(self, paths: tuple[str, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of parameters."""
        return tuple(self.parts.shapes[path] for path in paths)


def ops_of(kernels: str, generation: Generation) -> Ops:
    """The op implementations: "pallas" is what the engine takes on a GPU, "xla" its path without kernels.

    On a CPU Pallas kernels are interpreted.
    """
    backend = "triton" if kernels == "pallas" else "xla"
    return select_ops(backend, jax.default_backend(), False, generation)


def random_params(model: Model) -> dict[str, jax.Array]:
    """Parameters by path: normal values that keep activations in range; weights of norms are 1."""

    def made(shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        return (jax.random.normal(key, shape.shape, jnp.bfloat16) * shape.shape[-1] ** -0.5).astype(
            shape.dtype
        )

    make = jax.jit(made, static_argnums=0)
    keys = jax.random.split(jax.random.key(0), len(model.parts.shapes))
    return {path: make(shape, key) for (path, shape), key in zip(model.parts.shapes.items(), keys)}


def random_cache(model: Model, num_blocks: int) -> KVCache:
    """Pools of random values: zeros would make some hardware faster."""
    config = model.config
    shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    stored = storage_dtype(model.dtype, model.ops.platform)
    make = jax.jit(lambda key: jax.random.normal(key, shape, model.dtype).astype(stored))
    keys = jax.random.split(jax.random.key(1), 2 * config.num_layers)

    def scale_K() -> jax.Array:
        return jnp.ones(config.num_kv_heads, jnp.float32)  # each its own: they are donated

    return tuple(LayerKV(make(k), make(v), scale_K(), scale_K()) for k, v in zip(keys[::2], keys[1::2]))


def cache_shapes(model: Model, num_blocks: int) -> KVCache:
    """Shapes of ``random_cache``."""
    return jax.eval_shape(lambda: random_cache(model, num_blocks))
