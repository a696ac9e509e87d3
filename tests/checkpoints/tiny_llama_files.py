"""Tiny Llama checkpoints, and the logits that the engine's model computes from what was loaded."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.checkpoints.loader import load_params
from jaxinfer.checkpoints.model_files import ModelFiles, open_model
from jaxinfer.kv_cache.layout import LayerKV, group_layers
from jaxinfer.models.build import AbstractModel, abstract_model
from jaxinfer.models.registry import family, parse_config
from pallas_kernels.select import select_ops

OPS = select_ops("reference", "cpu", strict=True)
TOKENS = (5, 17, 300, 4, 4, 91, 250, 8)
SLOTS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def make_model(architecture: str = "Llama", seed: int = 0, **options: Any) -> Any:
    """A float32 ``transformers`` model whose random weights are all of use (norms differ from 1)."""
    config_class = getattr(transformers, f"{architecture}Config")
    config = config_class(**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            flat = weight.ndim == 1 or "embed" in name
            weight.copy_((0.3 * noise + weight) if "norm" in name else noise if flat else noise / 8)
    return model


def hf_logits(model: Any, tokens: tuple[int, ...] = TOKENS) -> np.ndarray:
    """``[T, V]`` as ``transformers`` computes them."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def abstract(files: ModelFiles, dtype: Any = jnp.float32) -> AbstractModel:
    return abstract_model(parse_config(files.config), OPS, jnp.dtype(dtype))


def load(files: ModelFiles, dtype: Any = jnp.float32) -> tuple[AbstractModel, dict[str, jax.Array]]:
    """The model of opened files and its parameters."""
    config = parse_config(files.config)
    model = abstract(files, dtype)
    weights = files.weight_map(family(config.architecture).weight_map(config))
    return model, load_params(model.shapes, weights, files.source, lambda _, array: jnp.asarray(array))


def our_logits(path: Path, tokens: tuple[int, ...] = TOKENS) -> np.ndarray:
    """``[T, V]`` float32 logits of one sequence in one step, from the checkpoint at ``path``."""
    abstract_lm, params = load(open_model(path))
    leaves = tuple(params[name] for name in abstract_lm.shapes)
    model = abstract_lm.merge(leaves)
    T = len(tokens)
    blocks = -(-T // SLOTS)
    specs = model.kv_specs()
    pools = [jnp.zeros((1 + blocks, spec.num_kv_heads, SLOTS, spec.head_dim)) for spec in specs]
    ones = [jnp.ones(spec.num_kv_heads) for spec in specs]
    groups = len(group_layers(specs)[0])
    batch = ForwardBatch(
        token_ids_T=jnp.asarray(tokens, jnp.int32),
        positions_T=jnp.arange(T, dtype=jnp.int32),
        query_start_Q=jnp.asarray([0, T], jnp.int32),
        context_len_R=jnp.asarray([T], jnp.int32),
        block_tables=(jnp.arange(1, 1 + blocks, dtype=jnp.int32)[None],) * groups,
        slots=(SLOTS + jnp.arange(T, dtype=jnp.int32),) * groups,
    )
    hidden_TD, _ = model(batch, tuple(LayerKV(p, p, one, one) for p, one in zip(pools, ones)))
    return np.asarray(model.logits(hidden_TD))
