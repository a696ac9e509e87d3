"""Log-probabilities of outputs and prompts through the engine."""

import numpy as np
import pytest

from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.outputs import FlatLogprobs, RequestOutput
from jaxinfer.param_checks import InvalidParamsError
from jaxinfer.sampling_params import OutputKind, SamplingParams
from tests.support.engines import (
    Job,
    config,
    context_script,
    ids,
    run,
    scripted,
    sequence_script,
    token_params,
)
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("logprobs")


def reference(prompt: list[int], position: int) -> np.ndarray:
    """Float64 log-softmax of the script's logits at a position."""

    class Asked:
        prompt_token_ids = tuple(prompt)

    logits = np.asarray(context_script()(Asked, 0, position), np.float64)  # type: ignore[arg-type]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def check_prompt(output: RequestOutput, num_top: int) -> None:
    prompt, entries = list(output.prompt_token_ids), output.prompt_logprobs
    assert isinstance(entries, list)
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position in range(1, len(prompt)):
        expected, entry = reference(prompt, position), entries[position]
        assert entry is not None
        assert entry[prompt[position]].logprob == pytest.approx(expected[prompt[position]], abs=1e-4)
        best = np.argsort(-expected, kind="stable")[:num_top].tolist()
        assert set(entry) == {*best, prompt[position]}
        assert [t for t, e in entry.items() if t != prompt[position] or t in best] != [] or num_top == 0
        assert entry[prompt[position]].rank == 1 + int((expected > expected[prompt[position]]).sum())


# ---- LPB-01


@pytest.mark.parametrize("number", [21, 1_000_000, -1, 1.5, True, "3"])
def test_lpb_01_counts_outside_0_to_20_are_refused(number):
    with pytest.raises(InvalidParamsError, match="logprobs"):
        SamplingParams(logprobs=number)
    with pytest.raises(InvalidParamsError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=number)


@pytest.mark.parametrize("number", [0, 1, 3, 20])
def test_lpb_01_entries_per_token(number):
    """Pinned: the chosen token is always in the entry, besides the ``number`` most likely, and comes first."""
    engine = scripted(context_script())
    prompt = list(range(7))
    params = token_params(logprobs=number, max_tokens=4, temperature=1.0, seed=5)
    choice = run(engine, [Job(ids(prompt), params)])[0].outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids) == 4
    total = 0.0
    for i, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs)):
        expected = reference(prompt, len(prompt) + i)
        assert next(iter(entry)) == token
        total += entry[token].logprob
        best = np.argsort(-expected, kind="stable")[:number].tolist()
        assert set(entry) == {token, *best}
        for other in entry:
            assert entry[other].logprob == pytest.approx(expected[other], abs=1e-4)
        ranked = sorted((e.rank, t) for t, e in entry.items() if t in best)
        assert [t for _, t in ranked] == best
    assert choice.cumulative_logprob == pytest.approx(total)


def test_lpb_01_absent_means_none():
    choice = run(scripted(context_script()), [Job(ids([1]), token_params(max_tokens=3))])[0].outputs[0]
    assert choice.logprobs is None
    assert choice.cumulative_logprob is None


def test_lpb_01_bytes_of_the_entries_make_up_the_text():
    tokenizer = ByteTokenizer(literals=(" cat",))
    tokens = [*tokenizer.encode("a"), tokenizer.id_of(" cat"), 0xE2, 0x82, 0xAC]
    engine = scripted(sequence_script(tokens), tokenizer=tokenizer)
    params = SamplingParams(temperature=0, logprobs=0, max_tokens=9)
    choice = run(engine, [Job(ids([1]), params)])[0].outputs[0]
    assert choice.text == "a cat€"
    assert choice.logprobs is not None
    assert (
        b"".join(tokenizer.token_bytes(next(iter(entry))) for entry in choice.logprobs)
        == choice.text.encode()
    )
    decoded = [entry[token].decoded_token for token, entry in zip(choice.token_ids, choice.logprobs)]
    assert decoded[:2] == ["a", " cat"]


# ---- LPB-02


@pytest.mark.parametrize("length", [1, 2, 6, 8, 9, 23])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lpb_02_scoring_a_prompt(length, max_tokens):
    """``max_tokens=0``: no token is generated, one entry per prompt token, the first None, finish_reason 'length'."""
    engine = scripted(context_script(), config(chunk_size=8))
    params = token_params(max_tokens=max_tokens, prompt_logprobs=2, logprobs=2)
    jobs = [Job(ids(range(10, 10 + length)), params), Job(ids(range(50, 50 + length)), params)]
    for output in run(engine, jobs):
        check_prompt(output, 2)
        choice = output.outputs[0]
        assert len(choice.token_ids) == max_tokens
        assert choice.finish_reason == "length"
        assert len(choice.logprobs or ()) == max_tokens


def test_lpb_02_scoring_fills_the_whole_context():
    engine = scripted(context_script(), config(num_blocks=64), max_model_len=64)
    output = run(engine, [Job(ids(range(64)), token_params(max_tokens=0, prompt_logprobs=0))])[0]
    check_prompt(output, 0)


def test_lpb_02_scoring_of_several_choices_scores_the_prompt_once():
    (output,) = run(
        scripted(context_script()), [Job(ids(range(9)), token_params(max_tokens=2, n=3, prompt_logprobs=1))]
    )
    check_prompt(output, 1)
    assert len(output.outputs) == 3


# ---- LPB-03


P1, P2 = [*range(8), 20, 21], [*range(8), 30, 31]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("order", [[P1, P2], [P2, P1], [P1, P1], [P1[:4], P1[:5], P1[:8], P1[:9], P1]])
def test_lpb_03_prompt_logprobs_do_not_depend_on_what_ran_before(overlap, warm, order):
    engine = scripted(context_script(), config(chunk_size=4, overlap=overlap))
    plain = token_params(max_tokens=2, ignore_eos=True)
    if warm:
        run(engine, [Job(ids(P1), plain)])
    for prompt in order:
        (output,) = run(engine, [Job(ids(prompt), token_params(max_tokens=2, prompt_logprobs=1))])
        check_prompt(output, 1)
        assert output.num_cached_tokens == 0
    (later,) = run(engine, [Job(ids(P1), plain)])
    assert later.num_cached_tokens > 0, "what they computed is in the cache for others"
    together = run(engine, [Job(ids(p), token_params(max_tokens=2, prompt_logprobs=1)) for p in order])
    for output in together:
        check_prompt(output, 1)


@pytest.mark.parametrize("overlap", [0, 1])
def test_lpb_03_prompt_logprobs_after_a_preemption(overlap):
    """The recomputation gives the entries again; they are reported once."""
    engine = scripted(context_script(), config(num_blocks=9, chunk_size=4, overlap=overlap, max_num_seqs=3))
    params = token_params(max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    prompts = [list(range(10 * i, 10 * i + 9)) for i in range(3)]
    for output in run(engine, [Job(ids(p), params) for p in prompts]):
        check_prompt(output, 1)
        assert len(output.outputs[0].token_ids) == 12
    assert engine.core.stats.preemptions > 0


# ---- other forms


def test_named_tokens_of_outputs():
    prompt = list(range(5))
    params = token_params(max_tokens=3, logprob_token_ids=[7, 300])
    choice = run(scripted(context_script()), [Job(ids(prompt), params)])[0].outputs[0]
    assert choice.logprobs is not None
    for i, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs)):
        expected = reference(prompt, len(prompt) + i)
        assert set(entry) == {token, 7, 300}
        for named in (7, 300):
            assert entry[named].logprob == pytest.approx(expected[named], abs=1e-4)
            assert entry[named].rank is None or named == token


def test_named_tokens_of_the_prompt_from_a_start():
    """Rows belong to positions from ``prompt_logprob_start`` on; -1 pads; before the start there are no entries."""
    prompt = list(range(40, 52))
    rows = [[1, 2], [3, -1], [4, 5], [6]]
    params = token_params(max_tokens=0, prompt_logprob_token_ids=rows, prompt_logprob_start=5)
    entries = run(scripted(context_script(), config(chunk_size=4)), [Job(ids(prompt), params)])[
        0
    ].prompt_logprobs
    assert isinstance(entries, list)
    assert entries[:5] == [None] * 5
    for position in range(5, 12):
        named = [t for t in rows[position - 5] if t >= 0] if position - 5 < len(rows) else []
        expected, entry = reference(prompt, position), entries[position]
        assert entry is not None
        assert set(entry) == {prompt[position], *named}
        for token in entry:
            assert entry[token].logprob == pytest.approx(expected[token], abs=1e-4)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_flat_logprobs_hold_the_same_as_objects(kind):
    prompt = list(range(6))
    results = []
    for flat in (False, True):
        params = token_params(
            max_tokens=4, logprobs=3, prompt_logprobs=2, flat_logprobs=flat, output_kind=kind
        )
        results.append(run(scripted(context_script()), [Job(ids(prompt), params)])[0])
    plain, flat_result = results
    for objects, arrays in (
        (plain.outputs[0].logprobs, flat_result.outputs[0].logprobs),
        (plain.prompt_logprobs, flat_result.prompt_logprobs),
    ):
        assert isinstance(arrays, FlatLogprobs)
        assert isinstance(objects, list)
        assert len(arrays) == len(objects)
        for i, entry in enumerate(objects):
            span = range(arrays.starts[i], arrays.ends[i])
            assert [arrays.token_ids[j] for j in span] == list(entry or {})
            assert [arrays.logprobs[j] for j in span] == [e.logprob for e in (entry or {}).values()]
            assert [arrays.ranks[j] for j in span] == [e.rank for e in (entry or {}).values()]


def test_processed_logprobs_are_those_of_the_law():
    """Raw: of the model. Processed: -inf outside the top k, temperature applied."""
    prompt = [1, 2, 3]
    values = {"max_tokens": 1, "temperature": 0.5, "top_k": 2, "seed": 1, "logprobs": 3}
    entries = []
    for mode in ("raw", "processed"):
        choice = run(
            scripted(context_script()), [Job(ids(prompt), token_params(logprobs_mode=mode, **values))]
        )[0].outputs[0]
        assert choice.logprobs is not None
        entries.append(next(iter(choice.logprobs)))
    expected = reference(prompt, 3)
    best = np.argsort(-expected)[:3].tolist()
    assert entries[0][best[0]].logprob == pytest.approx(expected[best[0]], abs=1e-4)
    scaled = expected[best[:2]] / 0.5
    scaled -= np.log(np.exp(scaled).sum())
    for token, value in zip(best[:2], scaled):
        assert entries[1][token].logprob == pytest.approx(value, abs=1e-4)
    assert all(e.logprob == -np.inf for t, e in entries[1].items() if t not in best[:2])


def test_delta_outputs_report_prompt_logprobs_once():
    engine = scripted(context_script())
    params = token_params(max_tokens=3, prompt_logprobs=0, output_kind=OutputKind.DELTA, ignore_eos=True)
    (seq,) = engine.inputs.process("r", ids(range(5)), params)
    assembler = OutputAssembler(seq.request, None)
    engine.core.add([seq])
    outputs = []
    while engine.core.has_work:
        for delta in engine.core.step():
            assembler.add(delta)
            outputs.append(assembler.take())
    assert [o.prompt_logprobs is not None for o in outputs] == [True, False, False]
