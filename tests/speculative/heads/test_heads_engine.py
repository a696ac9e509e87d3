"""Heads in the engine: exact outputs, and the drafts that the head alone would make of the same tokens."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.drafts import Drafts
from jaxinfer.engine.build import Engine
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.runner.block_copies import PoolCopies
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.head_drafter import HeadDrafter
from jaxinfer.speculative.head_entries import LoadedHead
from jaxinfer.speculative.heads.config import parse_eagle, parse_eagle3, parse_medusa
from jaxinfer.speculative.heads.head import DraftHead, Method
from jaxinfer.speculative.heads.loading import make_head
from jaxinfer.speculative.heads.programs import HeadFunctions, HeadLeaves
from jaxinfer.speculative.trees.dynamic import TreeShape
from jaxinfer.structured.spec import StructuredOutputs
from tests.engine.test_invariance_tiny_lm import BOUND, PARAMS, PROMPTS, Seen, cold_runs
from tests.support.draft_trees import paths_by_definition, paths_of
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import (
    DEVICE_BLOCKS,
    MAX_MODEL_LEN,
    Beside,
    MakeDrafter,
    tiny_model,
    tiny_settings,
)
from tests.support.tokenizers import ByteTokenizer

# What compiles is a method with chains or with trees. One of each of EAGLE's two is quick, the other two are slow.
CHAINS = [pytest.param("eagle", marks=pytest.mark.slow), "eagle3", "medusa"]
GROWN = ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)]
DEPTH = 4
SHAPE = TreeShape(4, 3)
"""Trees of four sequences do not grow together: their tokens do not fit a step."""
DRAFT_VOCAB = 160


@cache
def head_of(method: Method) -> tuple[DraftHead, tuple[Any, ...]]:
    """A random head of Tiny LM."""
    target = tiny_model()
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 48}
    hf = {"rope_theta": 1000.0, **layer}
    rng = np.random.default_rng(3)
    vocab_map = None
    if method == "medusa":
        config: Any = parse_medusa({"medusa_num_heads": DEPTH, "medusa_num_layers": 1}, target.config)
    elif method == "eagle":
        config = parse_eagle(hf, target.config)
    else:
        config = parse_eagle3({**hf, "draft_vocab_size": DRAFT_VOCAB}, target.config)
        vocab_map = np.sort(rng.choice(target.config.vocab_size, DRAFT_VOCAB, replace=False)).astype(np.int32)
    float32 = jnp.dtype(jnp.float32)
    head = make_head(
        method, config, vocab_map, target.ops, float32, param_dtype=float32, max_model_len=MAX_MODEL_LEN
    )
    leaves = tuple(
        jnp.asarray(rng.standard_normal(s.shape) * s.shape[-1] ** -0.5 + (len(s.shape) == 1), s.dtype)
        for s in head.shapes.values()
    )
    return head, leaves


@cache
def functions_of(method: Method, plan: CompilePlan) -> HeadFunctions:
    """Engines of one plan share what is compiled."""
    return HeadFunctions.make(head_of(method)[0], tiny_model().parts, plan)


def settings(*, trees: bool = False, **options: Any) -> Any:
    speculative = SpeculativeConfig(
        drafter="head",
        model="tiny",
        trees=trees,
        tree_depth=SHAPE.depth,
        tree_top_k=SHAPE.width,
        max_drafts=5,
        max_step_drafts=12,
    )
    return tiny_settings(speculative=speculative, **options)


class Watched(HeadDrafter):
    """Notes what it proposes behind which tokens."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        proposals = super().propose(jobs)
        for job, drafts in zip(jobs, proposals):
            tokens = tuple(job.seq.token_ids(0, job.seq.num_tokens))
            assert drafts
            PROPOSED.append((job, tokens, drafts))
        if self._growth is not None:
            job, drafts = jobs[0], proposals[0]
            best, rest = paths_by_definition(self, job, SHAPE)
            assert best - rest <= paths_of(drafts) <= best | rest
        return proposals


PROPOSED: list[tuple[DraftJob, tuple[int, ...], Drafts]] = []


def drafter_of(method: Method, trees: bool = False) -> MakeDrafter:
    def make(beside: Beside) -> HeadDrafter:
        head, leaves = head_of(method)
        functions = functions_of(method, beside.plan)
        groups = (0,) * len(head.kv_specs)
        pools = allocate(
            head.kv_specs, groups, (DEVICE_BLOCKS,), beside.plan.block_size, jnp.dtype(jnp.float32), {}
        )
        programs = beside.programs
        head_leaves = HeadLeaves(leaves, programs.embed_leaves, programs.head_leaves)
        return Watched(
            LoadedHead(head, functions, head_leaves, pools, PoolCopies.make(groups)),
            beside.plan,
            beside.builder,
            beside.sampler,
            num_layers=2,
            hidden_size=64,
            dtype=jnp.dtype(jnp.float32),
            trees=SHAPE if trees else None,
        )

    return make


def speculating(method: Method, *, trees: bool = False, **options: Any) -> Engine:
    return tiny_model().engine(settings(trees=trees, **options), drafter=drafter_of(method, trees))


@pytest.fixture(scope="module")
def solo() -> list[Seen]:
    return cold_runs(tiny_model())


def fresh_drafts(engine: Engine, tokens: Sequence[int]) -> Drafts:
    """What is drafted behind tokens of which all but the newest, which a greedy request gets, are computed at once."""
    PROPOSED.clear()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    run(engine, [Job(ids(tokens[:-1]), params)])
    assert PROPOSED[0][1] == tokens
    return PROPOSED[0][2]


@pytest.mark.feature("draft head speculation")
@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"overlap": 0, "chunk_size": 5}, marks=pytest.mark.feature("chunked prefill")),
        pytest.param({"overlap": 1, "num_blocks": 12}, marks=pytest.mark.feature("preemption", "overlap")),
    ],
    ids=str,
)
def test_drafts_are_those_of_the_head_alone(method, options, solo):
    """Features and entries are right behind chunks, preemptions, accepted and rejected drafts and neighbours."""
    PROPOSED.clear()
    engine = speculating(method, prefix_caching=False, **options)
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    stats = engine.core.stats
    assert stats.drafted_tokens > 30
    assert stats.preemptions > 0 or "num_blocks" not in options
    greedy = [(tokens, d) for job, tokens, d in PROPOSED if job.seq.request.params.greedy and len(d) >= DEPTH]
    cold = speculating(method, prefix_caching=False, overlap=0)
    for tokens, drafts in greedy[::3]:
        assert fresh_drafts(cold, tokens) == drafts


@pytest.mark.feature("draft head speculation", "draft tree speculation")
def test_medusa_drafts_trees(solo):
    PROPOSED.clear()
    engine = tiny_model().engine(settings(trees=True), drafter=drafter_of("medusa", trees=True))
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    assert any(not drafts.is_chain for _, _, drafts in PROPOSED)


@pytest.mark.feature("dynamic tree speculation")
@pytest.mark.parametrize("method", GROWN)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"overlap": 0, "chunk_size": 5},
            marks=[pytest.mark.feature("chunked prefill"), pytest.mark.slow],
        ),
        pytest.param({"overlap": 1, "num_blocks": 14}, marks=pytest.mark.feature("preemption", "overlap")),
    ],
    ids=str,
)
def test_eagle_drafts_dynamic_trees(method, options, solo):
    """The best paths by EAGLE-2's definition, by a cold engine too; tokens are those without drafts."""
    PROPOSED.clear()
    engine = speculating(method, trees=True, prefix_caching=False, **options)
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    stats = engine.core.stats
    assert stats.drafted_tokens > 60
    assert stats.preemptions > 0 or "num_blocks" not in options
    assert any(not drafts.is_chain for _, _, drafts in PROPOSED)
    whole = [
        (tokens, drafts)
        for job, tokens, drafts in PROPOSED
        if job.seq.request.params.greedy and min(job.limit, job.depth) >= 5 and job.slots >= SHAPE.expanded
    ]
    assert whole or "num_blocks" in options
    cold = speculating(method, trees=True, prefix_caching=False, overlap=0)
    for tokens, drafts in whole[::2]:
        assert paths_of(fresh_drafts(cold, tokens)) == paths_of(drafts)


@pytest.mark.feature("dynamic tree speculation", "structured output", "logprobs", "n > 1")
@pytest.mark.parametrize("method", GROWN)
def test_dynamic_trees_are_pruned_to_the_form(method):
    """Beside a request without a form; log-probabilities make the forced tokens sampled ones."""
    form = StructuredOutputs(regex=r"[ -~]{6}(yes|no): [ -~]{8}(true|false)")
    common: dict[str, Any] = {"max_tokens": 30, "seed": 5, "structured_outputs": form}
    jobs = [
        Job(ids(PROMPTS[0]), SamplingParams(temperature=1, n=2, logprobs=1, **common)),
        Job(ids(PROMPTS[1]), SamplingParams(temperature=0, **common)),
        Job(ids(PROMPTS[2]), PARAMS[1]),
    ]
    tokenizer = ByteTokenizer()
    plain = tiny_model().engine(tiny_settings(), tokenizer=tokenizer)
    fast = tiny_model().engine(settings(trees=True), tokenizer=tokenizer, drafter=drafter_of(method, True))
    got = run(fast, jobs)
    for a, b in zip(got, run(plain, jobs)):
        assert [choice.token_ids for choice in a.outputs] == [choice.token_ids for choice in b.outputs]
    for output in got[:2]:
        for choice in output.outputs:
            text = bytes(token for token in choice.token_ids if token < 256).decode()
            assert re.fullmatch(form.regex, text)
    assert fast.core.stats.drafted_tokens > 10  # few fit the form


@pytest.mark.feature("draft head speculation", "prefix cache", "n > 1")
@pytest.mark.parametrize(
    ("method", "trees"),
    [
        pytest.param("eagle", False, marks=pytest.mark.slow),
        ("eagle3", False),
        ("medusa", False),
        pytest.param("eagle", True, marks=pytest.mark.feature("dynamic tree speculation")),
        pytest.param(
            "eagle3", True, marks=[pytest.mark.feature("dynamic tree speculation"), pytest.mark.slow]
        ),
    ],
)
def test_choices_and_prefix_hits(method, trees):
    """Blocks with entries are shared, and copied."""
    params = SamplingParams(temperature=1, n=3, max_tokens=14, ignore_eos=True, detokenize=False, seed=7)
    jobs = [Job(ids(PROMPTS[0]), params), Job(ids(PROMPTS[3]), params, at=3)]
    fast, plain = speculating(method, trees=trees), tiny_model().engine(tiny_settings())
    for a, b in zip(run(fast, jobs), run(plain, jobs)):
        assert [choice.token_ids for choice in a.outputs] == [choice.token_ids for choice in b.outputs]
    assert fast.core.stats.drafted_tokens > 0
