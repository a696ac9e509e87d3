"""Chunks: only the one that reaches the end of the prompt samples, and chunking is about what is left to compute."""

import numpy as np
import pytest

from tests.support.engines import Driver, Job, config, context_script, ids, run, sequence_script, token_params
from tests.support.ledger import ledgered

LENGTHS = [3, 4, 5, 7, 8, 9, 12, 15, 16, 17]


def prompt_values(output) -> list[float | None]:
    entries = zip(output.prompt_token_ids, output.prompt_logprobs)
    return [None if entry is None else entry[token].logprob for token, entry in entries]


def settings(overlap: int = 1, budget: int = 64, chunk: int | None = 4):
    return config(chunk_size=chunk, max_num_batched_tokens=budget, overlap=overlap)


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("at_once", [1, 3])
def test_sch_06_only_the_last_chunk_samples(max_tokens, overlap, at_once):
    for length in LENGTHS:
        jobs = [
            Job(
                ids(range(10 * i, 10 * i + length)),
                token_params(max_tokens=max_tokens, prompt_logprobs=0, ignore_eos=True),
            )
            for i in range(at_once)
        ]
        whole, _ = ledgered(settings(chunk=None), script=context_script())
        engine, ledger = ledgered(settings(overlap, budget=6 if at_once > 1 else 64), script=context_script())
        expected, outputs = run(whole, jobs), run(engine, jobs)
        for want, got in zip(expected, outputs):
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
            assert got.outputs[0].finish_reason == "length"
            assert len(got.prompt_token_ids) == length
            np.testing.assert_allclose(prompt_values(got)[1:], prompt_values(want)[1:], atol=1e-5)
            assert prompt_values(got)[0] is None
        rows = [row for plan in ledger.plans for row in plan.rows]
        for name in {row.seq.request.request_id for row in rows}:
            sampled = [row.samples for row in rows if row.seq.request.request_id == name]
            assert sum(sampled) == max_tokens
            assert all(
                plan.num_tokens <= engine.config.scheduler.max_num_batched_tokens for plan in ledger.plans
            )


@pytest.mark.parametrize("overlap", [0, 1])
def test_sch_06_the_first_news_comes_after_the_last_chunk(overlap):
    engine, ledger = ledgered(settings(overlap), script=sequence_script([65, 66]))
    driver = Driver(engine)
    driver.add("r", ids(range(17)), token_params(max_tokens=2))
    while not driver.deltas["r"]:
        driver.step()
    chunks = [row.num_tokens for plan in ledger.plans for row in plan.rows if not row.samples]
    assert chunks == [4, 4, 4, 4]
    assert driver.deltas["r"][0].token_ids == (65,)
    driver.drain()


# ---- SCH-08


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("suffix", range(1, 10))
def test_sch_08_chunks_are_cut_from_what_the_cache_does_not_hold(suffix, max_tokens):
    shared = list(range(16))
    prompt = [*shared, *range(100, 100 + suffix)]
    warm = Job(ids(shared), token_params(max_tokens=1, ignore_eos=True))
    job = Job(ids(prompt), token_params(max_tokens=max_tokens, ignore_eos=True))
    cold, _ = ledgered(settings(chunk=8), script=context_script())
    engine, ledger = ledgered(settings(chunk=8), script=context_script())
    run(engine, [warm])
    del ledger.plans[:]
    (output,) = run(engine, [job])
    assert output.num_cached_tokens == 16
    assert output.outputs[0].token_ids == run(cold, [job])[0].outputs[0].token_ids
    prefills = [row for plan in ledger.plans for row in plan.rows if row.start < len(prompt)]
    assert [row.num_tokens for row in prefills] == ([suffix] if suffix <= 8 else [8, 1])


@pytest.mark.parametrize("length", range(17, 25))
def test_sch_08_prompt_logprobs_do_not_read_the_cache(length):
    prompt = [*range(16), *range(100, 100 + length - 16)]
    engine, ledger = ledgered(settings(chunk=8), script=context_script())
    run(engine, [Job(ids(range(16)), token_params(max_tokens=1))])
    del ledger.plans[:]
    job = Job(ids(prompt), token_params(max_tokens=1, prompt_logprobs=1))
    (output,) = run(engine, [job])
    assert output.num_cached_tokens == 0
    assert sum(row.num_tokens for plan in ledger.plans for row in plan.rows) == length
    cold, _ = ledgered(settings(chunk=None), script=context_script())
    np.testing.assert_allclose(prompt_values(output)[1:], prompt_values(run(cold, [job])[0])[1:], atol=1e-5)


def test_sch_08_growing_chat():
    """Three turns; each prompt is the last prompt, its answer, and a new question."""
    engine, ledger = ledgered(settings(chunk=8), script=context_script())
    prompt, hits = list(range(18)), []
    for turn in range(3):
        job = Job(ids(prompt), token_params(max_tokens=5, ignore_eos=True))
        cold, _ = ledgered(settings(chunk=8), script=context_script())
        (output,) = run(engine, [job])
        assert output.outputs[0].token_ids == run(cold, [job])[0].outputs[0].token_ids
        hits.append(output.num_cached_tokens)
        prompt += [*output.outputs[0].token_ids, 200 + turn, 201 + turn]
    assert hits == [0, 20, 28], "full blocks of prompt and answer, the newest token excepted"
    assert all(plan.num_tokens > 0 for plan in ledger.plans)
