"""DeepSeek-V2 and V3: routing against ``transformers``, published sizes, and what is refused."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from model_driver import REFERENCE_OPS
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from jaxinfer.batch.forward_batch import ForwardBatch
from jaxinfer.kv_cache.allocate import allocate, bytes_per_block
from jaxinfer.kv_cache.layout import LayerKVSpec, group_layers
from jaxinfer.layers.moe import SparseMLP
from jaxinfer.models.build import abstract_model
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import parse_config
from jaxinfer.models.segments import run_segment, segmented_model
from pallas_kernels.select import select_ops

YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
V2: dict[str, Any] = {
    **LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 160,
    "routed_scaling_factor": 16.0,
    "q_lora_rank": 1536,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
}
V3: dict[str, Any] = {
    **V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
PUBLISHED = {
    # name: configuration, billions of parameters, bytes of a token in bfloat16, those of full keys and values
    "v2-lite": (LITE, 15.7, 27 * 576 * 2, 27 * 16 * (192 + 128) * 2),
    "v2": (V2, 235.7, 60 * 576 * 2, 60 * 128 * (192 + 128) * 2),
    "v3": (V3, 671.0, 61 * 576 * 2, 61 * 128 * (192 + 128) * 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """Parameters and cache of a configuration alone; the cache is 9 times (V2-Lite) and 71 times (V2, V3) smaller than
    one of all heads' keys and values."""
    hf, billions, latent_bytes, full_bytes = PUBLISHED[name]
    config = parse_config(hf)
    shapes = abstract_model(config, REFERENCE_OPS, jnp.bfloat16).shapes
    assert abs(sum(math.prod(s.shape) for s in shapes.values()) / 1e9 - billions) < 0.01 * billions
    specs = kv_specs(config)
    windows, groups = group_layers(specs)
    assert windows == (None,)
    assert bytes_per_block(specs, groups, 16, jnp.dtype(jnp.bfloat16)) == (16 * latent_bytes,)
    full = (LayerKVSpec(config.num_heads, config.head_dim, None, 128),) * config.num_layers
    assert bytes_per_block(full, groups, 16, jnp.dtype(jnp.bfloat16)) == (16 * full_bytes,)
    assert full_bytes / latent_bytes == pytest.approx(320 * config.num_heads / 576)


def test_the_softmax_scale_has_the_factor_of_yarn():
    config = parse_config(V3)
    assert config.query_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert parse_config({**V3, "rope_scaling": None}).query_scale == 192**-0.5


@pytest.mark.parametrize("hf", [LITE, V3], ids=["v2-lite", "v3"])
def test_every_op_has_a_kernel_on_gpus(hf):
    """A dense and a sparse layer are traced with the ops of a GPU, where a fallback is an error."""
    config = parse_config({**hf, "num_hidden_layers": 2, "first_k_dense_replace": 1})
    ops = select_ops("triton", "gpu", strict=True, generation="hopper")
    dtype = jnp.dtype(jnp.bfloat16)
    model = segmented_model(config, ops, dtype, param_dtype=dtype, max_model_len=4096, layers_per_segment=2)
    T, R, M = 8, 4, 256

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    batch = ForwardBatch(int32(T), int32(T), int32(R + 1), int32(R), (int32(R, M),), (int32(T),), int32(T, 1))
    cache = jax.eval_shape(lambda: allocate(kv_specs(config), (0, 0), (100,), 16, dtype, {}))
    x_TD, ropes = jax.eval_shape(model.embed, model.structs(model.embed_paths), batch)
    (segment,) = model.segments
    out_TD, new_cache, (rows_LE,) = jax.eval_shape(
        partial(run_segment, segment.kind), model.structs(segment.paths), cache, x_TD, ropes, batch
    )
    assert out_TD == x_TD
    assert new_cache == cache
    assert rows_LE == int32(1, config.moe.num_experts)


ROUTERS = {
    "v2 greedy": (LITE, {}),
    "v2 groups": (V2, {}),
    "v3": (V3, {}),
    "v3 without normalisation": (V3, {"norm_topk_prob": False}),
    "v3 one group": (V3, {"n_group": 1, "topk_group": 1}),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_equals_transformers(name):
    hf, changes = ROUTERS[name]
    small = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 8,
    }
    hf = {**hf, "first_k_dense_replace": 1, **small, **changes}
    is_v3 = "V3" in hf["architectures"][0]
    config_class, router_class = (
        (DeepseekV3Config, DeepseekV3TopkRouter) if is_v3 else (DeepseekV2Config, DeepseekV2TopkRouter)
    )
    theirs = router_class(config_class(**{k: v for k, v in hf.items() if k != "architectures"}))
    rng = np.random.default_rng(0)
    weight_ED, bias_E = rng.normal(size=(32, 32)) / 4, rng.normal(size=32) / 5
    x_TD = rng.normal(size=(50, 32)).astype(np.float32)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(weight_ED))
        if is_v3:
            theirs.e_score_correction_bias.copy_(torch.from_numpy(bias_E))
        _, want_TX, want_ids_TX = theirs(torch.from_numpy(x_TD))
    moe = parse_config(hf).moe
    assert moe is not None
    ours = SparseMLP(moe, 32, "silu", bias=False, ops=REFERENCE_OPS, param_dtype=jnp.dtype(jnp.float32))
    ours.router.weight[...] = jnp.asarray(weight_ED, jnp.float32)
    if ours.choice_bias is not None:
        ours.choice_bias[...] = jnp.asarray(bias_E, jnp.float32)
    weight_TX, ids_TX = map(np.asarray, ours.route(jnp.asarray(x_TD)))
    place_TX, want_place_TX = np.argsort(ids_TX), np.argsort(want_ids_TX.numpy())
    np.testing.assert_array_equal(
        np.take_along_axis(ids_TX, place_TX, 1), np.take_along_axis(want_ids_TX.numpy(), want_place_TX, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(weight_TX, place_TX, 1),
        np.take_along_axis(want_TX.numpy(), want_place_TX, 1),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (
            V2,
            {"topk_method": "noaux_tc"},
            "topk_method='noaux_tc' is not supported; supported: greedy, group_limi",
        ),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported; supported: softmax"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported; supported: noaux_tc"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; supported: sigmoid"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (V3, {"n_group": 7}, "n_group 7 and topk_group 4 do not fit n_routed_experts 256"),
        (V3, {"topk_group": 9}, "n_group 8 and topk_group 9 do not fit"),
        (V3, {"kv_lora_rank": None}, "'kv_lora_rank' must be a positive integer"),
        (
            V3,
            {"first_k_dense_replace": -1},
            "'first_k_dense_replace' must be an integer that is not negative",
        ),
        (V3, {"routed_scaling_factor": "2"}, "'routed_scaling_factor' must be a number"),
    ],
)
def test_unknown_settings_are_refused_by_name(hf, changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config({**hf, **changes})
