"""Every model family through the whole engine: greedy tokens equal those of ``transformers``."""

import pytest
import torch

from jaxinfer import LLM, SamplingParams
from tests.models.tiny_checkpoints import CASES, SERVED_LENGTH, prompt, save
from tests.support.kernels import kernels

NEW_TOKENS = 10
WITH_KERNELS = ("qwen3_moe", "gemma2", "deepseek_v3")
"""Enough for the options of the kernels: windows, soft caps, odd head widths, norms of heads, experts, latents."""

SLOW = (
    "deepseek_v2",
    "deepseek_v3",
    "llama",
    "mistral_full",
    "phi3_longrope_partial",
    "qwen2",
    "qwen3_moe_mixed",
)
"""Of each family one case is quick, with windows where it has them; latents have tests of their own. The logits of all
cases are compared in tests/models."""


def _greedy(model: torch.nn.Module, tokens: tuple[int, ...]) -> list[int]:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                pytest.mark.feature(CASES[case][0], "greedy"),
                *([pytest.mark.kernels] if case in WITH_KERNELS else []),
                *([pytest.mark.slow] if case in SLOW else []),
            ],
        )
        for case in CASES
    ],
)
def test_greedy_tokens_equal_transformers(case, tmp_path):
    """Two prompts in one batch, the longer one in chunks; windows are shorter than it."""
    model = save(case, tmp_path)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        tokenizer="none",
        max_model_len=SERVED_LENGTH.get(case, 48),
        cache={"block_size": 4, "num_blocks": 64},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 8},
        compile={"warm_up": "lazy", "cache_dir": "none"},
        kernel={"backend": kernels(), "strict": True},
    )
    prompts = [prompt(19, seed=1), prompt(5, seed=2)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params)
    assert [o.outputs[0].token_ids for o in outputs] == [_greedy(model, p) for p in prompts]
