"""Draft heads with random weights in published layouts, a dense NumPy statement of their papers, and a paged driver."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.layout import KVCache, LayerKV
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.registry import parse_config
from jaxinfer.speculative.heads.head import DraftHead
from jaxinfer.speculative.heads.loading import load_head, make_head, open_head
from pallas_kernels.select import select_ops
from tests.support.compiling import UNOPTIMIZED

D, H, K, h, F, V, VD, L = 32, 4, 2, 8, 48, 64, 24, 8
THETA, EPS = 1000.0, 1e-5
SLOTS, WIDTH = 4, 4
OPS = select_ops("reference", "cpu", strict=True)
TARGET: TransformerConfig = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "intermediate_size": F,
        "max_position_embeddings": 64,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
    }
)
LAYER_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class HeadFile:
    """What a published directory holds: ``tensors`` under the file's names."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    file: str = "model.safetensors"

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / self.file)
        return directory


@dataclass
class Random:
    """Random tensors that keep activations near 1."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return (self.rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(self, size: int = D) -> np.ndarray:
        return (1 + 0.3 * self.rng.standard_normal(size)).astype(np.float32)


def layer_tensors(prefix: str, rows: Random, in_features: int) -> dict[str, np.ndarray]:
    """Attention, second norm and MLP of a Llama layer."""
    return {
        f"{prefix}self_attn.q_proj.weight": rows.matrix(H * h, in_features),
        f"{prefix}self_attn.k_proj.weight": rows.matrix(K * h, in_features),
        f"{prefix}self_attn.v_proj.weight": rows.matrix(K * h, in_features),
        f"{prefix}self_attn.o_proj.weight": rows.matrix(D, H * h),
        f"{prefix}post_attention_layernorm.weight": rows.norm(),
        f"{prefix}mlp.gate_proj.weight": rows.matrix(F, D),
        f"{prefix}mlp.up_proj.weight": rows.matrix(F, D),
        f"{prefix}mlp.down_proj.weight": rows.matrix(D, F),
    }


def eagle_file(*, layers: int = 1, bias: bool = True, embedding: bool = False) -> HeadFile:
    """An EAGLE-1/2 head as its authors publish it."""
    rows = Random()
    tensors = {"fc.weight": rows.matrix(D, 2 * D)}
    if bias:
        tensors["fc.bias"] = 0.1 * rows.norm()
    if embedding:
        tensors["embed_tokens.weight"] = rows.matrix(V, D) * 3
    for i in range(layers):
        tensors |= layer_tensors(f"layers.{i}.", rows, D)
        if i:
            tensors[f"layers.{i}.input_layernorm.weight"] = rows.norm()
    return HeadFile({**LAYER_CONFIG, "num_hidden_layers": layers, "bias": bias}, tensors)


def eagle3_file(
    *, prefix: str = "", layer: str = "midlayer.", draft_vocab: int = VD, **config: Any
) -> HeadFile:
    """An EAGLE-3 head as its authors publish it, or with vLLM's names (prefix "model.", layer "layers.0.")."""
    rows = Random()
    tensors = {
        f"{prefix}fc.weight": rows.matrix(D, 3 * D),
        f"{prefix}norm.weight": rows.norm(),
        "lm_head.weight": rows.matrix(draft_vocab, D),
        f"{prefix}{layer}hidden_norm.weight": rows.norm(),
        f"{prefix}{layer}input_layernorm.weight": rows.norm(),
        **layer_tensors(f"{prefix}{layer}", rows, 2 * D),
    }
    ids = np.sort(rows.rng.choice(V, draft_vocab, replace=False))
    tensors["d2t"] = (ids - np.arange(draft_vocab)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(V), ids)
    return HeadFile({**LAYER_CONFIG, "draft_vocab_size": draft_vocab, **config}, tensors)


def medusa_file(*, heads: int = 3, blocks: int = 1) -> HeadFile:
    """Medusa heads as their authors publish them."""
    rows = Random()
    tensors = {}
    for k in range(heads):
        for j in range(blocks):
            tensors[f"{k}.{j}.linear.weight"] = rows.matrix(D, D)
            tensors[f"{k}.{j}.linear.bias"] = 0.1 * rows.norm()
        tensors[f"{k}.{blocks}.weight"] = rows.matrix(V, D)
    config = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": "someone/a-model",
    }
    return HeadFile(config, tensors, "medusa_lm_head.safetensors")


def vllm_medusa_file(*, draft_vocab: int = VD, heads: int = 2, shared: bool = False) -> HeadFile:
    """Medusa heads with vLLM's names, over a part of the vocabulary or with the target's output head."""
    rows = Random()
    tensors: dict[str, np.ndarray] = {}
    for k in range(heads):
        tensors[f"blocks.{k}.layers.0.weight"] = rows.matrix(D, D)
        if not shared:
            tensors[f"lm_heads.{k}.weight"] = rows.matrix(draft_vocab, D)
    config: dict[str, Any] = {
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": 1,
    }
    if shared:
        config["original_lm_head"] = True
    else:
        config["truncated_vocab_size"] = draft_vocab
        tensors["token_map"] = np.sort(rows.rng.choice(V, draft_vocab, replace=False)).astype(np.int64)
    return HeadFile(config, tensors)


def load(directory: Path, target: TransformerConfig = TARGET) -> tuple[DraftHead, tuple[jax.Array, ...]]:
    """A head in float32 and its leaves."""
    files = open_head(directory, target)
    head = make_head(
        files.method,
        files.config,
        files.vocab_map,
        OPS,
        jnp.float32,
        param_dtype=jnp.float32,
        max_model_len=64,
    )
    params = load_head(head, files, lambda _, array: jnp.asarray(array))
    return head, tuple(params[path] for path in head.paths)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotate(x_nHh: np.ndarray, first: int) -> np.ndarray:
    """Rotary embedding of consecutive positions from ``first`` on."""
    angle = np.outer(np.arange(first, first + len(x_nHh)), THETA ** (-np.arange(0, h, 2) / h))[:, None]
    a, b = x_nHh[..., : h // 2], x_nHh[..., h // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def dense_layer(
    w: dict[str, np.ndarray], prefix: str, inputs: np.ndarray, residual: np.ndarray, first: int = 0
) -> np.ndarray:
    """A Llama layer over a whole sequence, in float64: attention of ``inputs``, residual, MLP."""
    n = len(inputs)
    q, k, v = (inputs @ w[f"{prefix}self_attn.{x}_proj.weight"].T for x in "qkv")
    q, k = rotate(q.reshape(n, H, h), first), rotate(k.reshape(n, K, h), first)
    k, v = np.repeat(k, H // K, 1), np.repeat(v.reshape(n, K, h), H // K, 1)
    scores = np.einsum("qhx,khx->hqk", q, k) / np.sqrt(h)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("hqk,khx->qhx", p / p.sum(-1, keepdims=True), v).reshape(n, H * h)
    x = residual + y @ w[f"{prefix}self_attn.o_proj.weight"].T
    m = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    gated = silu(m @ w[f"{prefix}mlp.gate_proj.weight"].T) * (m @ w[f"{prefix}mlp.up_proj.weight"].T)
    return x + gated @ w[f"{prefix}mlp.down_proj.weight"].T


@dataclass(frozen=True)
class Chunk:
    """The next entries of a sequence: rows of ``features`` and ``embeddings`` from ``start`` on."""

    sequence: int
    start: int
    stop: int


class HeadDriver:
    """Runs an autoregressive head over ragged batches, with pools that start as NaN."""

    def __init__(self, head: DraftHead, leaves: tuple[jax.Array, ...]) -> None:
        self.head, self.leaves = head, leaves
        pool = jnp.full((1 + 2 * WIDTH, K, SLOTS, h), jnp.nan, jnp.float32)
        ones_K = jnp.ones((K,), jnp.float32)
        self.kv: KVCache = (LayerKV(pool, pool, ones_K, ones_K),) * len(head.kv_specs)
        self._step = jax.jit(self._run, compiler_options=UNOPTIMIZED)

    def step(self, chunks: list[Chunk], x: list[np.ndarray], embeddings: list[np.ndarray]) -> np.ndarray:
        """Outputs of all entries of the chunks; ``x`` and ``embeddings`` are whole sequences, fused already."""
        T, count = 8, sum(c.stop - c.start for c in chunks)
        batch = self.batch(chunks, T)
        x_TD, e_TD = np.zeros((T, D), np.float32), np.zeros((T, D), np.float32)
        x_TD[:count] = np.concatenate([x[c.sequence][c.start : c.stop] for c in chunks])
        e_TD[:count] = np.concatenate([embeddings[c.sequence][c.start : c.stop] for c in chunks])
        out_TD, self.kv = self._step(self.leaves, jnp.asarray(x_TD), jnp.asarray(e_TD), self.kv, batch)
        return np.asarray(out_TD)[:count]

    def batch(self, chunks: list[Chunk], T: int) -> ForwardBatch:
        positions, slots = np.zeros(T, np.int32), np.zeros(T, np.int32)
        starts, lengths = np.zeros(3, np.int32), np.zeros(2, np.int32)
        tables = np.zeros((2, WIDTH), np.int32)
        t = 0
        for r, chunk in enumerate(chunks):
            where = np.arange(chunk.start, chunk.stop)
            blocks = np.array([7, 2, 5, 3]) if chunk.sequence else np.array([4, 1, 8, 6])
            positions[t : t + len(where)] = where
            slots[t : t + len(where)] = blocks[where // SLOTS] * SLOTS + where % SLOTS
            tables[r], lengths[r] = blocks, chunk.stop
            t += len(where)
            starts[r + 1 :] = t
        tokens = jnp.zeros(T, jnp.int32)
        return ForwardBatch(
            tokens,
            jnp.asarray(positions),
            jnp.asarray(starts),
            jnp.asarray(lengths),
            (jnp.asarray(tables),),
            (jnp.asarray(slots),),
        )

    def _run(
        self,
        leaves: tuple[jax.Array, ...],
        x_TD: jax.Array,
        embedding_TD: jax.Array,
        kv: KVCache,
        batch: ForwardBatch,
    ) -> tuple[jax.Array, KVCache]:
        assert self.head.forward is not None
        valid_T = jnp.arange(len(x_TD)) < batch.query_start_Q[-1]
        ropes = self.head.rope_tables(batch)
        return self.head.forward(leaves, x_TD, embedding_TD, ropes, kv, batch, valid_T)
