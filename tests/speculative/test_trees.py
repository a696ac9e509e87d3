"""Trees of drafts: the tokens and log-probabilities of a run without them, on a real runner and model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.drafts import Drafts
from jaxinfer.engine.build import Engine
from jaxinfer.request import Sequence as Seq
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.drafter import DraftJob
from jaxinfer.speculative.speculation import Speculation
from jaxinfer.structured.spec import StructuredOutputs
from tests.engine.test_invariance_tiny_lm import BOUND, PARAMS, PROMPTS, Seen, cold_runs
from tests.support import engines
from tests.support.engines import Job, ids, run
from tests.support.tiny_models import MAX_MODEL_LEN, MIXED, TinyModel, prompt_ids, tiny_model, tiny_settings
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("draft tree speculation")

SPECULATIVE = SpeculativeConfig(drafter="ngram", trees=True, max_drafts=6, max_step_drafts=14)


class Bush:
    """Proposes random trees that hold what comes, somewhere, and often as the last child.

    Args:
        coming: output of each prompt, if it is known.
        tokens: what else to propose.
    """

    def __init__(
        self, coming: dict[tuple[int, ...], Sequence[int]], tokens: Sequence[int] = range(3, 250)
    ) -> None:
        self._coming = coming
        self._tokens = list(tokens)
        self._rng = np.random.default_rng(0)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Drafts]:
        return [self._tree(job) for job in jobs]

    def forget(self, seq: Seq) -> None:
        pass

    def _tree(self, job: DraftJob) -> Drafts:
        rng, done = self._rng, len(job.seq.output_token_ids)
        coming = list(self._coming.get(job.seq.request.prompt_token_ids, ()))[done:]
        tokens: list[int] = []
        parents: list[int] = []
        on_path, depth = -1, 0
        while len(tokens) < job.limit:
            if depth < len(coming) and rng.random() < 0.5:
                parent, token = on_path, coming[depth]
            else:
                parent, token = int(rng.integers(-1, len(tokens))), int(rng.choice(self._tokens))
                if parent == on_path and depth < len(coming) and token == coming[depth]:
                    continue
            if (parent, token) in zip(parents, tokens):
                continue
            if parent == on_path and depth < len(coming) and token == coming[depth]:
                on_path, depth = len(tokens), depth + 1
            tokens.append(token)
            parents.append(parent)
        return Drafts.tree(tokens, parents)


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


def fast(model: TinyModel, drafter: Bush, **options: Any) -> Engine:
    engine = model.engine(tiny_settings(speculative=SPECULATIVE, **options))
    engine.core.speculation = Speculation(
        drafter, *SPECULATIVE.draft_limits, trees=True, max_model_len=MAX_MODEL_LEN
    )
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 0},
        pytest.param({"overlap": 1}, marks=pytest.mark.feature("overlap")),
        pytest.param({"chunk_size": 5}, marks=pytest.mark.feature("chunked prefill")),
        pytest.param({"num_blocks": 14, "chunk_size": 6}, marks=pytest.mark.feature("preemption")),
    ],
    ids=str,
)
def test_the_same_together_as_alone_without_trees(model, solo, options):
    coming = {tuple(prompt): seen.tokens for prompt, seen in zip(PROMPTS, solo)}
    engine = fast(model, Bush(coming), **options)
    outputs = run(engine, [Job(ids(prompt), params) for prompt, params in zip(PROMPTS, PARAMS)])
    for output, want in zip(outputs, solo):
        Seen.of(output).assert_close(want, BOUND)
    assert engine.core.stats.accepted_tokens > 15


@pytest.mark.feature("prefix cache")
def test_accepted_drafts_are_where_a_prefix_hit_looks_for_them(model):
    """K and V of accepted drafts were moved; a second turn reads them from the cache."""
    prompt = prompt_ids(9) * 2
    (first,) = run(model.engine(tiny_settings()), [Job(ids(prompt), PARAMS[0])])
    longer = [*prompt, *first.outputs[0].token_ids, *prompt_ids(3, 1)]
    (second,) = run(model.engine(tiny_settings(prefix_caching=False)), [Job(ids(longer), PARAMS[0])])
    coming = {tuple(p): o.outputs[0].token_ids for p, o in ((prompt, first), (longer, second))}
    engine = fast(model, Bush(coming))
    run(engine, [Job(ids(prompt), PARAMS[0])])
    hits = engine.core.stats.prefix_hit_tokens
    (again,) = run(engine, [Job(ids(longer), PARAMS[0])])
    assert engine.core.stats.prefix_hit_tokens - hits >= 28
    Seen.of(again).assert_close(Seen.of(second), BOUND)


GRAMMAR = {"structured_outputs": StructuredOutputs(regex="(AB|BA|C){6,9}"), "temperature": 1.0, "seed": 4}
REQUESTS = {
    "penalties": ({"frequency_penalty": 1.5, "repetition_penalty": 1.2}, "penalties"),
    "bias": ({"logit_bias": {65: -100.0}}, "bias, allowed ids, bad words"),
    "bad_phrase": ({"bad_words": ["AB"]}, "bias, allowed ids, bad words"),
    "top_k": ({"top_k": 2, "temperature": 1.0, "seed": 3}, "sampling"),
    "seed": ({"temperature": 1.3, "seed": 5}, "seeds"),
    "stop": ({"stop": ["BA", "C"], "temperature": 1.0, "seed": 8}, "stop strings and ids"),
    "logprobs": ({"logprobs": 3, "temperature": 1.0, "seed": 8, "logprobs_mode": "processed"}, "logprobs"),
    "n": ({"n": 3, "temperature": 1.0, "seed": 8}, "n > 1"),
    "grammar": (GRAMMAR, "structured output"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.feature(feature)) for name, (_, feature) in REQUESTS.items()],
)
def test_every_parameter_holds_at_every_node(name):
    """Tokens, log-probabilities and ends are those without drafts."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 14, **REQUESTS[name][0]})
    script, tokenizer = engines.static_script({65: 3.0, 66: 2.5, 67: 2.0}), ByteTokenizer()
    jobs = [Job(ids([65, 66, 65, 66]), params), Job(ids([70, 65]), params)]
    plain = run(engines.scripted(script, tokenizer=tokenizer), jobs)
    settings = engines.config(speculative=SPECULATIVE)
    engine = engines.scripted(script, settings, tokenizer=tokenizer)
    engine.core.speculation = Speculation(
        Bush({}, [65, 66, 67]), *SPECULATIVE.draft_limits, trees=True, max_model_len=64
    )
    for a, b in zip(run(engine, jobs), plain):
        for x, y in zip(a.outputs, b.outputs):
            assert (x.token_ids, x.finish_reason, x.stop_reason, x.text) == (
                y.token_ids,
                y.finish_reason,
                y.stop_reason,
                y.text,
            )
            assert str(x.logprobs) == str(y.logprobs)
    assert engine.core.stats.accepted_tokens > 0


@pytest.mark.parametrize("prompt", [50, 57, 60, 62])
def test_a_tree_fits_the_context(prompt):
    """Each node needs a slot, though its position lies before it."""
    settings = engines.config(speculative=SPECULATIVE, num_blocks=17, prefix_caching=False)
    engine = engines.scripted(engines.static_script({65: 5.0}), settings)
    engine.core.speculation = Speculation(
        Bush({}, [65, 66, 67]), *SPECULATIVE.draft_limits, trees=True, max_model_len=64
    )
    params = engines.token_params(max_tokens=100, ignore_eos=True)
    (output,) = run(engine, [Job(ids([66] * prompt), params)])
    assert output.outputs[0].token_ids == [65] * (64 - prompt)


def test_a_tree_needs_the_setting():
    engine = engines.scripted(engines.static_script({65: 5.0}), engines.config(speculative=SPECULATIVE))
    engine.core.speculation = Speculation(Bush({}, [65, 66, 67]), 4, 8)
    with pytest.raises(ValueError, match=r"speculative\.trees is off"):
        run(engine, [Job(ids([66, 65]), engines.token_params(max_tokens=9))])
