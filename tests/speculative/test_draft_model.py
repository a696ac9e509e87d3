"""Drafts by a model with K and V of its own: exact outputs, and drafts as good as the draft model is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.build import Engine
from jaxinfer.engine.draft_setup import check_same_vocabulary
from jaxinfer.request import Sequence as Seq
from jaxinfer.runner.follower import TargetStep
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.build import make_speculation
from jaxinfer.speculative.draft_model import DraftModel
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.structured.spec import StructuredOutputs
from tests.engine.test_invariance_tiny_lm import BOUND, PARAMS, PROMPTS, Seen, cold_runs
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import MIXED, TinyModel, draft_model, prompt_ids, tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("draft model speculation")

SPECULATIVE = SpeculativeConfig(drafter="model", model="tiny", max_drafts=5, max_step_drafts=12)
SETTINGS = [
    pytest.param({"overlap": 0}, id="synchronous"),
    pytest.param({"overlap": 1}, id="overlap", marks=pytest.mark.feature("overlap")),
    pytest.param({"chunk_size": 5}, id="chunks", marks=pytest.mark.feature("chunked prefill")),
    pytest.param(
        {"num_blocks": 12, "prefix_caching": False}, id="preemption", marks=pytest.mark.feature("preemption")
    ),
    pytest.param({"num_blocks": 12, "chunk_size": 6}, id="preemption, chunks, prefix cache"),
]


class Watched:
    """A draft model whose every fifth draft is replaced by another token, and all that it proposed."""

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter = drafter
        self.proposed: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
        self._count = 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        proposals = self._drafter.propose(jobs)
        for job, drafts in zip(jobs, proposals):
            self.proposed.append((job.seq.request.prompt_token_ids, len(job.seq.output_token_ids), drafts))
        return [tuple(self._spoiled(token) for token in drafts) for drafts in proposals]

    def forget(self, seq: Seq) -> None:
        self._drafter.forget(seq)

    def _spoiled(self, token: int) -> int:
        self._count += 1
        return token ^ 1 if self._count % 5 == 0 else token


def watched(engine: Engine) -> Watched:
    speculation = engine.core.speculation
    assert isinstance(speculation, Speculation)
    assert isinstance(speculation._drafter, DraftModel)
    speculation._drafter = watch = Watched(speculation._drafter)
    return watch


@pytest.fixture(
    scope="module",
    params=[pytest.param((None, None), marks=pytest.mark.slow), MIXED],
    ids=["full", "window"],
)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def solo(model: TinyModel) -> list[Seen]:
    return cold_runs(model)


@pytest.mark.parametrize("options", SETTINGS)
def test_a_draft_model_that_is_the_target_is_always_right(model, solo, options):
    """Its K and V are right behind chunks, prefix hits, preemptions and rejected drafts: a wrong entry is a wrong
    draft. Requests with penalties are left out of that: a draft's penalties do not count the drafts before it."""
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options), drafter=draft_model(model))
    watch = watched(engine)
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    stats = engine.core.stats
    assert stats.accepted_tokens > 0.4 * stats.drafted_tokens > 0
    assert stats.preemptions > 0 or "num_blocks" not in options
    tokens = {tuple(p): seen.tokens for p, seen, params in zip(PROMPTS, solo, PARAMS) if not params.penalised}
    checked = 0
    for prompt, start, drafts in watch.proposed:
        if prompt in tokens:
            want = tokens[prompt][start : start + len(drafts)]
            assert drafts[: len(want)] == want, f"behind {start} tokens"
            checked += len(want)
    assert checked > 20


@pytest.mark.parametrize("options", SETTINGS)
def test_the_tokens_do_not_depend_on_the_draft_model(model, solo, options):
    other = tiny_model(model.config.windows, seed=1)
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options), drafter=draft_model(other))
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    assert engine.core.stats.drafted_tokens > engine.core.stats.accepted_tokens


@pytest.mark.feature("structured output")
def test_under_a_grammar_drafts_are_drawn_within_its_masks(model):
    """So a draft model that is the target is always right there too; the form ends the answer."""
    form = StructuredOutputs(regex="(A|B|C){5}(D|E|F){5}(A|B|C){5}")
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=20, structured_outputs=form)
        for i, t in enumerate((0.0, 1.0))
    ]
    jobs = [Job(ids(PROMPTS[i]), p) for i, p in enumerate(params)]
    jobs.append(Job(ids(PROMPTS[2]), PARAMS[1]))
    plain = run(model.engine(tiny_settings(), tokenizer=ByteTokenizer()), jobs)
    engine = model.engine(
        tiny_settings(speculative=SPECULATIVE), tokenizer=ByteTokenizer(), drafter=draft_model(model)
    )
    for a, b in zip(run(engine, jobs), plain):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert engine.core.stats.accepted_tokens == engine.core.stats.drafted_tokens > 15


@pytest.mark.feature("prefix cache")
def test_prefix_hits_hold_for_the_draft_model(model):
    """A second turn drafts behind blocks that the first one computed."""
    settings = tiny_settings(speculative=SPECULATIVE)
    engine = model.engine(settings, drafter=draft_model(model))
    prompt = prompt_ids(9) * 2
    (output,) = run(engine, [Job(ids(prompt), PARAMS[0])])
    prompt = [*prompt, *output.outputs[0].token_ids, *prompt_ids(3, 1)]
    hits, drafted = engine.core.stats.prefix_hit_tokens, engine.core.stats.drafted_tokens
    run(engine, [Job(ids(prompt), PARAMS[0])])
    stats = engine.core.stats
    assert stats.prefix_hit_tokens - hits >= 28
    assert stats.drafted_tokens > drafted
    assert stats.accepted_tokens == stats.drafted_tokens


@pytest.mark.feature("n > 1")
def test_choices_share_the_draft_models_blocks(model):
    params = replace(PARAMS[1], n=3)
    engine = model.engine(tiny_settings(speculative=SPECULATIVE), drafter=draft_model(model))
    plain = model.engine(tiny_settings())
    jobs = [Job(ids(PROMPTS[0]), params)]
    (fast,), (slow,) = run(engine, jobs), run(plain, jobs)
    assert [c.token_ids for c in fast.outputs] == [c.token_ids for c in slow.outputs]
    assert engine.core.stats.accepted_tokens == engine.core.stats.drafted_tokens > 0


def test_a_long_gap_is_caught_up_in_several_steps(model):
    """A sequence that was not drafted for a while: what is missing may be more than a step holds."""
    engine = model.engine(
        tiny_settings(speculative=SPECULATIVE, max_num_batched_tokens=8), drafter=draft_model(model)
    )
    drafter = engine.core.speculation._drafter
    lost: list[Any] = []
    follow = drafter.follow

    def follow_and_lose(step: TargetStep) -> None:
        follow(step)
        for row in step.plan.rows:
            if len(row.seq.output_token_ids) >= 4 and row.seq not in lost:
                lost.append(row.seq)
                drafter.forget(row.seq)

    drafter.follow = follow_and_lose
    outputs = run(engine, [Job(ids(prompt_ids(25, i)), PARAMS[0]) for i in range(3)])
    assert len(lost) == 3
    assert all(len(output.outputs[0].token_ids) == 14 for output in outputs)
    assert engine.core.stats.accepted_tokens == engine.core.stats.drafted_tokens > 20


def test_the_vocabularies_must_agree():
    class Other(ByteTokenizer):
        def token_str(self, token_id: int) -> str:
            return "?" if token_id == 77 else super().token_str(token_id)

    check_same_vocabulary(ByteTokenizer(), ByteTokenizer())
    with pytest.raises(ValueError, match="token 77 is 'M' in the target and '\\?' in the draft model"):
        check_same_vocabulary(ByteTokenizer(), Other())


def test_a_model_needs_a_runner_that_computes_models():
    with pytest.raises(ConfigError, match="computes no models"):
        make_speculation(SPECULATIVE, 64)


@pytest.mark.parametrize("wrong", [{"drafter": "model"}, {"model": "x"}, {"drafter": "ngram", "model": "x"}])
def test_drafter_and_model_go_together(wrong):
    with pytest.raises(ValueError, match="one needs the other"):
        SpeculativeConfig(**wrong)
