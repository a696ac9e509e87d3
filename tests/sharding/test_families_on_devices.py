"""Every model family on several devices: loading from a checkpoint, tokens and log-probabilities."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.engine.model_setup import load_weights, set_up_model
from tests.models.tiny_checkpoints import CASES, SERVED_LENGTH, prompt, reference_logits, save

BOUND = 1e-4
HEADS = {"num_attention_heads": 8, "intermediate_size": 96}
"""Eight heads can be spread over eight devices; sparse cases keep the number of KV heads that they have."""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2),
    SamplingParams(seed=3, top_k=40, top_p=0.95, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2),
]
DENSE: list[dict[str, int]] = [
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"tensor": 2, "pipeline": 2},
    {"context": 4},
    {"tensor": 2, "context": 2, "pipeline": 2},
]
AXES = ("tensor parallel", "pipeline parallel", "context parallel")
SPARSE = {
    "qwen3_moe": [{"expert": 2}, {"tensor": 4, "expert": 2}, {"tensor": 2, "expert": 2, "exchange_rows": 4}],
    "mixtral": [{"expert": 4}, {"tensor": 2, "expert": 4}, {"expert": 4, "exchange_rows": 8}],
    "deepseek_v2": [{"expert": 4}, {"expert": 4, "exchange_rows": 4}],
    "deepseek_v3": [{"tensor": 2, "expert": 2}, {"tensor": 2, "expert": 2, "exchange_rows": 8}],
}


def settings(folder: Path, case: str, **parallel: Any) -> dict[str, Any]:
    return {
        "config": str(folder),
        "dtype": "float32",
        "tokenizer": "none",
        "max_model_len": SERVED_LENGTH.get(case, 48),
        "cache": {"block_size": 4, "num_blocks": 64},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
        "compile": {"warm_up": "lazy", "cache_dir": "none"},
        "kernel": {"backend": "xla"},
        "parallel": parallel,
    }


def generate(folder: Path, case: str, **parallel: Any) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and log-probabilities of two prompts, each greedy and sampled; the longer one in chunks."""
    options = settings(folder, case, **parallel)
    llm = LLM(options.pop("config"), **options)
    prompts = [{"prompt_token_ids": list(prompt(length, seed=length))} for length in (19, 5)]
    outputs = llm.generate([p for p in prompts for _ in PARAMS], PARAMS * len(prompts))
    stats, chosen = llm.engine.core.stats, json.loads((folder / "config.json").read_text())
    assert bool(stats.sparse_layers) == ("num_experts_per_tok" in chosen)
    for tokens_E in stats.expert_tokens_LE:
        assert tokens_E.sum() == chosen["num_experts_per_tok"] * stats.computed_tokens
    choices = [output.outputs[0] for output in outputs]
    return [
        (c.token_ids, [{t: entry.logprob for t, entry in position.items()} for position in c.logprobs or []])
        for c in choices
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.feature(CASES[case][0], *AXES, "logprobs")) for case in CASES],
)
def test_the_same_as_on_one_device(case: str, tmp_path: Path) -> None:
    save(case, tmp_path, **(HEADS if CASES[case][0] in ("Qwen3Moe", "Mixtral") else {}))
    alone = generate(tmp_path, case)
    for parallel in DENSE + SPARSE.get(case, []):
        for (tokens, logprobs), (expected, expected_logprobs) in zip(
            generate(tmp_path, case, **parallel), alone, strict=True
        ):
            assert tokens == expected, parallel
            for found, want in zip(logprobs, expected_logprobs, strict=True):
                both = found.keys() & want.keys()
                assert len(both) >= len(want) - 1  # the last alternatives may tie within the bound
                assert max(abs(found[t] - want[t]) for t in both) <= BOUND, parallel


def test_weights_are_loaded_into_their_shares(tmp_path: Path) -> None:
    """Every device's pieces, put together, are what one device loads."""
    save("llama", tmp_path)
    loaded = []
    for tensor in (1, 2):
        options = settings(tmp_path, "llama", tensor=tensor)
        config = EngineConfig.load(options.pop("config"), options)
        loaded.append(load_weights(set_up_model(config)))
    whole, shared = loaded
    for path in ("layers.0.mlp.down.weight", "layers.1.attention.output.weight", "final_norm.weight"):
        np.testing.assert_array_equal(np.asarray(shared[path]), np.asarray(whole[path]))
    gate_up = [np.asarray(shard.data) for shard in shared["layers.0.mlp.gate_up.weight"].addressable_shards]
    gates, ups = zip(*(np.split(piece, 2) for piece in gate_up))
    np.testing.assert_array_equal(
        np.concatenate([*gates, *ups]), np.asarray(whole["layers.0.mlp.gate_up.weight"])
    )
    embed = np.asarray(shared["embed.weight"])
    np.testing.assert_array_equal(embed[:320], np.asarray(whole["embed.weight"]))
    assert embed.shape[0] == 2 * 256
    assert {len(weight.sharding.device_set) for weight in jax.tree.leaves(shared)} == {2}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, "4 heads cannot be spread over 3 devices: 3 does not divide 4"),
        ({"tensor": 4, "expert": 4}, "4 x 4 x 1 = 16, but there are 8 devices"),
        ({"tensor": 2, "exchange_rows": 8}, "exchange_rows is set, but expert is 1"),
        ({"expert": 2, "context": 2, "exchange_rows": 8}, "exchange_rows is set and context is 2"),
        ({"expert": 2, "exchange_rows": 8}, "exchange_rows is set, but the model has no experts"),
        ({"tensor": 4, "expert": 2, "context": 2}, "parallel.context is 4 x 2 x 1 x 2 = 16, but there are 8"),
        ({"tensor": 4, "context": 2}, "4 merged_heads cannot be spread over 8 devices: 8 does not divide 4"),
        ({"context": 3}, "cache.block_size is 4 and parallel.context is 3: .* a multiple of 3"),
    ],
)
def test_what_cannot_be_shared_is_told(parallel: dict[str, int], message: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    options = settings(tmp_path, "llama", **parallel)
    with pytest.raises(ValueError, match=message):
        set_up_model(EngineConfig.load(options.pop("config"), options))


@pytest.mark.feature("pipeline parallel", "greedy", "chunked prefill")
def test_a_pipeline_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Stages of one and two layers; more requests than a batch takes."""
    model = save("llama_bias_tied_wide", tmp_path, num_hidden_layers=3)
    options = settings(tmp_path, "llama_bias_tied_wide", pipeline=2)
    options["parallel"]["stage_layers"] = (1, 2)
    options["scheduler"]["max_num_batched_tokens"] = 4
    before = set(threading.enumerate())
    llm = LLM(options.pop("config"), **options)
    prompts = [prompt(length, seed=length) for length in (11, 5, 3)]
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], PARAMS[0])
    for output, tokens in zip(outputs, prompts):
        sequence = list(tokens)
        for found in output.outputs[0].token_ids:
            assert found == int(reference_logits(model, tuple(sequence))[-1].argmax())
            sequence.append(found)
    del llm
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("stage-"):
            thread.join(5)
            assert not thread.is_alive(), "it would hold the weights"
