"""Typical acceptance, the lossy mode: which drafts count, how far its law is from the exact one, and who may use it."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.drafts import ROOT, Drafts
from jaxinfer.sampling.host import Drafts as SampledDrafts
from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.law import untruncated
from jaxinfer.sampling.typical import Typical, lossy_tokens
from jaxinfer.sampling.vocabulary import Vocabulary
from jaxinfer.sampling_params import SamplingParams
from tests.support import engines
from tests.support.engines import Job, ids, run

pytestmark = pytest.mark.feature("typical acceptance")

RULE = Typical(0.09, 0.3)
P, V, NODES = 8, 5, 6
QUICK = jax.jit(lossy_tokens, static_argnums=(4, 5))
TYPICAL = SpeculativeConfig(
    drafter="tests/support/drafters.py:Greedy", acceptance="typical", max_drafts=3, max_step_drafts=12
)


def by_definition(law_NV: np.ndarray, tree: Drafts, drawn: list[int]) -> list[int]:
    """What the root and each node are followed by; row 0 is the root, row 1 + i is node i."""

    def typical(node: int) -> bool:
        p_V = law_NV[1 + tree.parents[node]]
        entropy = -sum(p * np.log(p) for p in p_V if p > 0)
        return p_V[tree.tokens[node]] > min(RULE.epsilon, RULE.delta * np.exp(-entropy))

    def length(parent: int) -> int:
        return max((1 + length(i) for i in children(parent)), default=0)

    def children(parent: int) -> list[int]:
        return [i for i, other in enumerate(tree.parents) if other == parent and typical(i)]

    followed = list(drawn)
    for parent in range(-1, len(tree)):
        if behind := children(parent):
            followed[1 + parent] = tree.tokens[max(behind, key=lambda i: (length(i), -i))]
    return followed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_the_longest_path_of_typical_drafts_counts(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    parents = [data.draw(st.integers(ROOT, i - 1)) for i in range(NODES)]
    tree = Drafts(tuple(int(t) for t in rng.integers(0, V, NODES)), tuple(parents))
    logits_PV = rng.normal(scale=3, size=(P, V)).astype(np.float32)
    drawn = rng.integers(0, V, P)
    table = SamplingTable(1, V, NODES)
    table.set(0, SamplingParams(temperature=0.7), (0, 0), 1)
    before = np.array([-1, *(1 + parent for parent in parents)])
    drafts = SampledDrafts(np.array([-1, *tree.tokens]), before)
    inputs = table.build(np.zeros(NODES + 1, int), np.arange(NODES + 1), P, drafts=drafts)
    law = untruncated(jnp.asarray(logits_PV.max(-1)), inputs)
    found = QUICK(jnp.asarray(drawn, jnp.int32), logits_PV, law, inputs, RULE, Vocabulary(V))
    law_NV = np.asarray(jax.nn.softmax(logits_PV / 0.7))[: NODES + 1].astype(np.float64)
    want = by_definition(law_NV, tree, drawn[: NODES + 1].tolist())
    np.testing.assert_array_equal(np.asarray(found)[: NODES + 1], want)
    greedy = replace(inputs, temperature_P=np.zeros(P, np.float32))
    found = QUICK(jnp.asarray(drawn, jnp.int32), logits_PV, law, greedy, RULE, Vocabulary(V))
    np.testing.assert_array_equal(found, drawn)


@cache
def outputs(probability: float, acceptance: str, **params: Any) -> np.ndarray:
    """Tokens of many requests where token 65, which is always drafted, has this probability and 30 others the rest."""
    rest = (1 - probability) / 30
    script = engines.static_script(
        {65: np.log(probability)} | {70 + i: np.log(rest) for i in range(30)}, -90.0
    )
    config = engines.config(max_num_seqs=4, speculative=TYPICAL.model_copy(update={"acceptance": acceptance}))
    engine = engines.scripted(script, config)
    values = {"temperature": 1.0, "max_tokens": 25, "ignore_eos": True, "detokenize": False, **params}
    jobs = [Job(ids([66, 67]), SamplingParams(**values, seed=seed)) for seed in range(4)]
    return np.array([output.outputs[0].token_ids for output in run(engine, jobs)])


def test_its_law_is_another_one():
    """Of a law with p = 0.2 for the draft, typical acceptance emits it wherever it is drafted: three tokens of four."""
    exact, lossy = outputs(0.2, "exact"), outputs(0.2, "typical")
    of_exact, of_lossy = (exact == 65).mean(), (lossy == 65).mean()
    assert abs(of_exact - 0.2) < 0.1
    assert 0.7 < of_lossy < 0.9
    # Neither the first token nor those behind the last draft of a step are drafted: they are what exact gives.
    np.testing.assert_array_equal(lossy[:, 0], exact[:, 0])


def test_what_is_not_typical_changes_nothing():
    np.testing.assert_array_equal(outputs(0.005, "typical"), outputs(0.005, "exact"))
    greedy = [outputs(0.02, acceptance, temperature=0.0) for acceptance in ("typical", "exact")]
    np.testing.assert_array_equal(*greedy)


def test_it_has_to_be_asked_for_and_is_told(caplog: pytest.LogCaptureFixture):
    assert SpeculativeConfig(drafter="ngram").acceptance == "exact"
    with pytest.raises(ValueError, match="belong to acceptance: typical, but acceptance is exact"):
        SpeculativeConfig(drafter="ngram", typical_delta=0.4)
    with pytest.raises(ValueError, match="there is no drafter"):
        SpeculativeConfig(acceptance="typical")
    with caplog.at_level(logging.WARNING):
        engines.scripted(engines.uniform_script(), engines.config(speculative=TYPICAL))
    assert "typical: lossy" in caplog.text
