"""Abstract models: shapes without memory, and the way from leaves to a module inside a trace."""

import jax
import jax.numpy as jnp
import numpy as np
from model_driver import REFERENCE_OPS, Chunk, ModelDriver, read_checkpoint
from tiny_checkpoints import prompt, reference_logits, save

from jaxinfer.models.build import abstract_model, logical_axes
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import FAMILIES, family

# 70 B parameters: building it for real would not pass unnoticed.
LARGE = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}


def test_a_large_model_is_built_without_memory():
    config = family("LlamaForCausalLM").parse(LARGE)
    model = abstract_model(config, REFERENCE_OPS, jnp.bfloat16)
    assert model.shapes["layers.79.attention.qkv.weight"] == jax.ShapeDtypeStruct((10240, 8192), jnp.bfloat16)
    assert model.shapes["layers.0.mlp_norm.weight"].dtype == jnp.float32
    assert sum(s.size for s in model.shapes.values()) > 70e9
    assert len(kv_specs(config)) == 80
    assert hash(model.graphdef) == hash(abstract_model(config, REFERENCE_OPS, jnp.bfloat16).graphdef)


def test_every_parameter_has_logical_axes():
    names = {"vocab", "embed", "heads", "merged_heads", "kv_heads", "mlp", "experts", "expert_mlp", None}
    small = {
        **LARGE,
        "num_hidden_layers": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "attention_bias": True,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 20,
        "n_shared_experts": 1,
    }
    for name in FAMILIES:
        config = family(name).parse({**small, "text_config": small})
        shapes = abstract_model(config, REFERENCE_OPS, jnp.bfloat16).shapes
        axes = logical_axes(config, REFERENCE_OPS, jnp.bfloat16)
        assert axes.keys() == shapes.keys()
        for path, shape in shapes.items():
            assert len(axes[path]) == len(shape.shape), path
            for axis in axes[path]:
                assert ({part.name for part in axis} if isinstance(axis, tuple) else {axis}) <= names, path


def test_bfloat16_is_close_to_float32(tmp_path):
    """Activations in bfloat16, logits in float32: they are not rounded to bfloat16 on the way out."""
    model = save("gemma3", tmp_path)
    config, params = read_checkpoint(tmp_path)
    driver = ModelDriver(config, params)
    low = abstract_model(config, REFERENCE_OPS, jnp.bfloat16)
    leaves = tuple(jnp.asarray(params[path], s.dtype) for path, s in low.shapes.items())
    tokens = prompt(12)
    cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 4 else x, driver.cache)

    @jax.jit
    def step(leaves, batch, cache):
        module = low.merge(leaves)
        hidden_TD, cache = module(batch, cache)
        return hidden_TD, module.logits(hidden_TD), cache

    hidden_TD, logits_TV, cache = step(leaves, driver.batch([Chunk(0, 0, tokens)], 12), cache)
    assert hidden_TD.dtype == cache[0].k_NKSh.dtype == jnp.bfloat16
    assert logits_TV.dtype == jnp.float32
    assert not np.array_equal(logits_TV, logits_TV.astype(jnp.bfloat16).astype(jnp.float32))
    expected = reference_logits(model, tokens)
    assert np.abs(np.asarray(logits_TV) - expected).mean() < 0.05 * expected.std()
