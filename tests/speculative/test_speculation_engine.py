"""Speculation in the step loop: the same tokens as without it, in fewer steps, with every feature."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config_speculative import SpeculativeConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.build import make_speculation
from jaxinfer.structured.spec import StructuredOutputs
from tests.support import engines
from tests.support.engines import Driver, Job, ids, token_params
from tests.support.tokenizers import ByteTokenizer

DRAFTERS = Path(engines.__file__).parent / "drafters.py"
NGRAM = SpeculativeConfig(drafter="ngram", max_drafts=5, max_step_drafts=12, ngram_shortest=1)
SUFFIX = SpeculativeConfig(drafter="suffix", max_drafts=5, max_step_drafts=12, suffix_shortest=1)
FEW = SpeculativeConfig(drafter=f"{DRAFTERS}:FewTokens", max_drafts=4, max_step_drafts=12)
GREEDY = SpeculativeConfig(drafter=f"{DRAFTERS}:Greedy", max_drafts=4, max_step_drafts=12)
OFF = SpeculativeConfig()
LIKED = {65: 3.0, 66: 2.5, 67: 2.0}
PERIODIC = [65, 66, 67, 65, 66, 67, 65, 66, 68, 65, 66, 67, 65, 66]


DRAFTERS_MARKED = [
    pytest.param(NGRAM, id="ngram", marks=pytest.mark.feature("n-gram speculation")),
    pytest.param(SUFFIX, id="suffix", marks=pytest.mark.feature("suffix speculation")),
    pytest.param(FEW, id="few", marks=pytest.mark.feature("own drafter speculation")),
]
of_every_drafter = pytest.mark.parametrize("speculative", DRAFTERS_MARKED)


def both(script, jobs, speculative, **options):
    """Outputs with and without speculation, and the engine that speculated."""
    plain = engines.scripted(script, engines.config(**options))
    fast = engines.scripted(script, engines.config(speculative=speculative, **options))
    return engines.run(fast, jobs), engines.run(plain, jobs), fast


def assert_same(fast, plain):
    for a, b in zip(fast, plain):
        for x, y in zip(a.outputs, b.outputs):
            assert x.token_ids == y.token_ids
            assert x.finish_reason == y.finish_reason
            assert x.stop_reason == y.stop_reason


@of_every_drafter
@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.feature("overlap"))])
def test_repetition_takes_fewer_steps(overlap, speculative):
    jobs = [Job(ids([1, 65, 66, 67]), token_params(max_tokens=14))]
    fast, plain, engine = both(engines.sequence_script(PERIODIC), jobs, speculative, overlap=overlap)
    assert_same(fast, plain)
    assert fast[0].outputs[0].token_ids == PERIODIC
    stats = engine.core.stats
    assert stats.steps <= (8 if speculative is not FEW else 14)
    assert stats.drafts > 0
    assert stats.accepted_tokens == sum(stats.accepted_by_depth) > 0
    assert stats.drafted_tokens >= stats.accepted_tokens


@pytest.mark.parametrize("speculative", DRAFTERS_MARKED[:2])
@pytest.mark.parametrize("prompt", range(22, 32))
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 100])
def test_spd_01_drafts_are_cut_near_the_ends(prompt, max_tokens, speculative):
    """No draft stands where no token may stand: behind max_tokens, or behind the end of the context. The pool has no
    spare block."""
    jobs = [
        Job(ids(([65, 66] * 16)[:prompt]), token_params(max_tokens=max_tokens, ignore_eos=True)),
        Job(ids([9]), token_params(max_tokens=2, ignore_eos=True)),
    ]
    script = engines.static_script({65: 5.0})
    options = {"num_blocks": 10, "prefix_caching": False}
    plain = engines.scripted(script, engines.config(**options), max_model_len=32)
    fast = engines.scripted(script, engines.config(speculative=speculative, **options), max_model_len=32)
    driver = Driver(fast)
    for name, job in enumerate(jobs):
        driver.add(str(name), job.prompt, job.params)
    while fast.core.has_work:
        driver.step()
        for seq in fast.core.scheduler.live_sequences():
            assert max(map(len, seq.tables)) <= 32 // 4
            assert len(seq.drafts) <= max(0, seq.max_tokens - len(seq.output_token_ids) - 1)
    engines.assert_clean(fast)
    outputs = engines.run(plain, jobs)
    for name, output in enumerate(outputs):
        assert driver.tokens(str(name)) == output.outputs[0].token_ids
        assert driver.finishes(str(name)) == ["length"]


SPD_04 = {
    "logit_bias": {"logit_bias": {65: -100.0}},
    "bad_words": {"bad_words": ["A"]},
    "bad_phrase": {"bad_words": ["AB"]},
    "allowed_token_ids": {"allowed_token_ids": [66, 67]},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "min_p": {"min_p": 0.9, "temperature": 2.0, "seed": 3},
    "top_k": {"top_k": 2, "temperature": 1.0, "seed": 3},
    "top_p": {"top_p": 0.7, "temperature": 1.0, "seed": 3},
    "seed": {"temperature": 1.3, "seed": 5},
    "min_tokens": {"min_tokens": 6, "logit_bias": {257: 100.0}},
    "stop_token_ids": {"stop_token_ids": [67], "temperature": 1.0, "seed": 11},
    "stop": {"stop": ["BA", "C"], "temperature": 1.0, "seed": 8},
    "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 8, "logprobs_mode": "processed"},
    "n": {"n": 3, "temperature": 1.0, "seed": 8},
    "grammar": {
        "structured_outputs": StructuredOutputs(regex="(AB|BA|C){6,9}"),
        "temperature": 1.0,
        "seed": 4,
    },
    "grammar_logprobs": {
        "structured_outputs": StructuredOutputs(regex="ABCABC[AB]*C"),
        "logprobs": 1,
        "temperature": 1.0,
        "seed": 4,
    },
}


FEATURES = {
    "bias, allowed ids, bad words": ("logit_bias", "bad_words", "bad_phrase", "allowed_token_ids"),
    "penalties": ("frequency_penalty", "presence_penalty", "repetition_penalty"),
    "sampling": ("min_p", "top_k", "top_p"),
    "seeds": ("seed",),
    "stop strings and ids": ("min_tokens", "stop_token_ids", "stop"),
    "logprobs": ("logprobs", "grammar_logprobs"),
    "n > 1": ("n",),
    "structured output": ("grammar", "grammar_logprobs"),
}
"""Which parameters belong to which feature of the support matrix."""


def _marked(name: str):
    features = [feature for feature, names in FEATURES.items() if name in names]
    return pytest.param(name, marks=pytest.mark.feature(*features))


@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.feature("overlap"))])
@of_every_drafter
@pytest.mark.parametrize("name", [_marked(name) for name in SPD_04])
def test_spd_04_every_parameter_holds_at_every_position(name, speculative, overlap):
    """Tokens, log-probabilities and ends are those without speculation, also at positions behind accepted drafts."""
    values = {"temperature": 0.0, "max_tokens": 14, **SPD_04[name]}
    tokenizer = ByteTokenizer()
    outputs = []
    for spec in (speculative, OFF):
        settings_ = engines.config(speculative=spec, overlap=overlap)
        engine = engines.scripted(engines.static_script(LIKED), settings_, tokenizer=tokenizer)
        params = SamplingParams(**values)
        outputs.append(engines.run(engine, [Job(ids([65, 66, 65, 66]), params), Job(ids([70, 65]), params)]))
        if spec is not OFF:
            assert engine.core.stats.drafts > 0
    assert_same(*outputs)
    for fast, plain in zip(*outputs):
        for x, y in zip(fast.outputs, plain.outputs):
            assert x.text == y.text
            assert x.logprobs == y.logprobs


@pytest.mark.feature("preemption", "structured output", "chunked prefill", "seeds")
@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.feature("overlap"))])
@of_every_drafter
def test_spd_05_preemption_drops_drafts(speculative, overlap):
    """A pool too small for two requests with a grammar: both lose their blocks, and get the uninterrupted answer."""
    params = SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=24,
        structured_outputs=StructuredOutputs(regex="[ABC]{22}"),
        logprobs=0,
    )
    jobs = [Job(ids([65, 66, 65]), params), Job(ids([66, 65, 66]), params)]
    script, tokenizer = engines.static_script(LIKED), ByteTokenizer()
    small = engines.config(
        num_blocks=10, speculative=speculative, chunk_size=4, overlap=overlap, prefix_caching=False
    )
    engine = engines.scripted(script, small, tokenizer=tokenizer)
    driver = Driver(engine)
    for name, job in enumerate(jobs):
        driver.add(str(name), job.prompt, job.params)
    while engine.core.has_work:
        driver.step()
        waiting = engine.core.scheduler.waiting
        assert all(not seq.drafts for seq in waiting)
    engines.assert_clean(engine)
    assert engine.core.stats.preemptions > 0
    assert engine.core.stats.drafts > 0
    alone = [engines.run(engines.scripted(script, tokenizer=tokenizer), [job])[0] for job in jobs]
    for name, output in enumerate(alone):
        assert driver.tokens(str(name)) == output.outputs[0].token_ids
        assert driver.finishes(str(name)) == ["stop"]


@pytest.mark.feature(
    "n-gram speculation",
    "suffix speculation",
    "own drafter speculation",
    "chunked prefill",
    "preemption",
    "overlap",
    "prefix cache",
)
@settings(max_examples=25, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.integers(1, 12),
            st.integers(1, 20),
            st.integers(0, 6),
            st.sampled_from([0.0, 1.0]),
            st.sampled_from([1, 1, 2]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    overlap=st.integers(0, 1),
    chunk=st.sampled_from([None, 3]),
    blocks=st.sampled_from([9, 14, 40]),
    speculative=st.sampled_from([NGRAM, SUFFIX, FEW]),
)
def test_random_loads_get_the_same_tokens(jobs, overlap, chunk, blocks, speculative):
    """Any mix of lengths, temperatures, choices and penalties, with chunks, preemptions and prefix hits."""
    made = [
        Job(
            ids(([65, 66, 67, 65] * 3)[:prompt]),
            token_params(
                max_tokens=min(tokens, 31 - prompt),
                temperature=temperature,
                seed=number,
                n=n if temperature else 1,
                frequency_penalty=0.7 if penalty else 0.0,
                ignore_eos=True,
            ),
            at=at,
        )
        for number, (prompt, tokens, at, temperature, n, penalty) in enumerate(jobs)
    ]
    options = {"overlap": overlap, "chunk_size": chunk, "num_blocks": blocks}
    fast, plain, _ = both(engines.static_script(LIKED), made, speculative, **options)
    assert_same(fast, plain)


def test_a_drafter_that_gives_too_many_is_cut_and_ended_sequences_are_forgotten():
    engine = engines.scripted(engines.static_script({65: 5.0}), engines.config(speculative=GREEDY))
    engines.run(engine, [Job(ids([1, 2]), token_params(max_tokens=9)) for _ in range(6)])
    speculation = engine.core.speculation
    assert speculation is not None
    assert not speculation._drafter.seen
    assert not speculation._lengths._lengths


def test_drafts_never_take_the_place_of_other_sequences_tokens():
    """Every sequence decodes in every step until it ends, although the drafts of the first ones would fill it; what
    the others leave is used."""
    config = engines.config(speculative=GREEDY, max_num_seqs=4, max_num_batched_tokens=6, overlap=0)
    record = []
    engine = engines.scripted(engines.static_script({65: 5.0}), config, record=record)
    driver = Driver(engine)
    for name in "0123":
        driver.add(name, ids([1]), token_params(max_tokens=12))
    while engine.core.has_work:
        living = {seq.request.request_id for seq in engine.core.scheduler.live_sequences()}
        driver.step()
        assert {row.seq.request.request_id for row in record[-1].rows} == living
    assert {len(driver.tokens(name)) for name in "0123"} == {12}
    drafted = [plan for plan in record if plan.drafted]
    assert max(len(plan.rows) for plan in drafted) == 4
    assert max(plan.num_tokens for plan in record) == 6


def test_an_unhealthy_position_behind_an_accepted_draft_ends_that_request_alone():
    def script(request, index, position):
        row = np.full(engines.VOCAB, -5.0, np.float32)
        row[65] = np.nan if request.request_id == "0" and position == 6 else 5.0
        return row

    engine = engines.scripted(script, engines.config(speculative=GREEDY))
    outputs = engines.run(engine, [Job(ids([1, 2]), token_params(max_tokens=9)) for _ in range(2)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert outputs[0].outputs[0].token_ids == [65] * 4


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("trigram", "allowed: none, ngram, suffix"),
        ("nowhere.py:Drafter", "no file nowhere.py"),
        (f"{DRAFTERS}:Missing", "defines no Missing"),
    ],
)
def test_an_unknown_drafter_is_an_error_that_names_what_is_allowed(drafter, message):
    with pytest.raises(ConfigError, match=message):
        make_speculation(SpeculativeConfig(drafter=drafter), 64)


def test_the_drafter_of_the_docs_works(tmp_path):
    """The code block of docs/speculation.md, in a file of its own."""
    text = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "again.py").write_text(code)
    again = SpeculativeConfig(drafter=f"{tmp_path}/again.py:Again", max_drafts=4, max_step_drafts=12)
    jobs = [Job(ids([1, 2]), token_params(max_tokens=12))]
    fast, plain, engine = both(engines.static_script({65: 5.0}), jobs, again)
    assert_same(fast, plain)
    assert engine.core.stats.steps < 8
