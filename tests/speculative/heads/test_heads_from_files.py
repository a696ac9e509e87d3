"""A published head beside a model, both from files, through the whole start: nothing is compiled afterwards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from tests.support.draft_heads import eagle3_file
from tests.support.tiny_checkpoint import write

SETTINGS: dict[str, Any] = {
    "model.max_model_len": 64,
    "cache.num_blocks": 40,
    "scheduler.max_num_seqs": 4,
    "scheduler.max_num_batched_tokens": 16,
    "compile.on_recompile": "error",
}
TREES: dict[str, Any] = {
    "speculative.drafter": "head",
    "speculative.trees": True,
    "speculative.tree_depth": 3,
    "speculative.tree_top_k": 3,
    "speculative.max_step_drafts": 12,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.feature("dynamic tree speculation")
def test_nothing_compiles_behind_the_warm_up(tmp_path: Path) -> None:
    files = eagle3_file(vocab_size=259)
    files.tensors["t2d"] = np.pad(files.tensors["t2d"], (0, 259 - len(files.tensors["t2d"])))
    head = files.write(tmp_path / "head")
    base = {
        "model.reference": str(write(tmp_path / "model")),
        "compile.cache_dir": str(tmp_path / "compiled"),
    }
    prompts = ["tell me about a", "bcd", "say it again and again"]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0, 0.5)]
    texts = []
    for more in ({"compile.warm_up": "lazy"}, {**TREES, "speculative.model": str(head)}):
        llm = LLM(EngineConfig.load(str(tmp_path / "model"), {**SETTINGS, **base, **more}))
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)])
        drafted = llm.engine.core.stats.drafted_tokens
    assert texts[0] == texts[1]
    assert drafted > 0


@pytest.mark.slow
@pytest.mark.feature("draft model speculation", "n > 1")
def test_nothing_compiles_behind_the_warm_up_of_a_draft_model(tmp_path: Path) -> None:
    """Choices that part in the middle of a block have it copied, in the draft model's cache too."""
    model = str(write(tmp_path / "model"))
    more = {"speculative.drafter": "model", "speculative.model": model, "speculative.max_drafts": 3}
    llm = LLM(EngineConfig.load(model, {**SETTINGS, "compile.cache_dir": str(tmp_path / "compiled"), **more}))
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate(["tell me about a"], params, progress=False)
    assert len(output.outputs) == 3
    assert llm.engine.core.stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculative.tree_depth": 9}, r"takes \(depth - 1\) \* top_k \+ 1 = 25 tokens in a step.* is 16"),
        ({"speculative.tree_depth": 0}, "tree_depth"),
        ({"speculative.tree_top_k": 40}, "tree_top_k"),
        ({"speculative.adaptive": True}, "does not go with trees"),
    ],
)
def test_trees_that_cannot_grow_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load("a/model", {**SETTINGS, **TREES, "speculative.model": "a/head", **wrong})
