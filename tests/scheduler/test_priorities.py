"""Priorities and order of arrival over whole runs."""

import itertools

import pytest

from jaxinfer.config import EngineConfig
from tests.support.engines import Driver, Job, config, ids, run, token_params
from tests.support.ledger import ledgered

pytestmark = pytest.mark.feature("priorities", "preemption")


def params(max_tokens: int):
    return token_params(temperature=1.0, seed=1, max_tokens=max_tokens, ignore_eos=True)


def solo(name: str, prompt: list[int], max_tokens: int) -> list[int]:
    engine, _ = ledgered(config(prefix_caching=False, overlap=0))
    return run(engine, [Job(ids(prompt), params(max_tokens), request_id=name)])[0].outputs[0].token_ids


@pytest.mark.parametrize("overlap", [0, 1])
def test_sch_05_urgent_requests_start_at_once_and_all_others_finish(overlap):
    """Pinned: policy 'priority' preempts strictly less urgent sequences for a batch slot, each of them at most
    ``max_preemptions`` (3) times, so the ten urgent requests cannot keep the others from finishing by step 140."""
    engine, _ = ledgered(config(max_num_seqs=2, policy="priority", overlap=overlap, num_blocks=100))
    arrivals = {5: [("u0", 0, 2)], **{6 + 3 * i: [(f"u{i + 1}", 0, 2)] for i in range(10)}}
    arrivals[10] = [("low2", 10, 8)]
    arrivals[20] = [("low3", 10, 8)]
    arrivals[0] = [("low0", 10, 50), ("low1", 10, 50)]
    driver, first, finished, asked = Driver(engine), {}, {}, {}
    for step in range(400):
        for name, priority, max_tokens in arrivals.get(step, []):
            asked[name] = ([len(asked) + 1] * 5, max_tokens)
            driver.add(name, ids(asked[name][0]), params(max_tokens), priority)
        for delta in driver.step():
            first.setdefault(delta.request_id, step)
            if delta.finish_reason is not None:
                finished[delta.request_id] = step
        if step > 40 and not engine.core.has_work:
            break
    driver.drain()
    assert first["u0"] <= 8
    for name, (prompt, max_tokens) in asked.items():
        output = driver.output(name)
        assert output.outputs[0].token_ids == solo(name, prompt, max_tokens)
        assert output.metrics is not None
        assert output.metrics.num_preemptions <= 3
        if name.startswith("low"):
            assert finished[name] <= 140
        else:
            assert output.metrics.num_preemptions == 0


def test_sch_05_urgent_before_all_waiting():
    """Policy 'priority', but nobody may be preempted: the urgent request is the next to get a slot."""
    engine, _ = ledgered(config(max_num_seqs=1, policy="priority", max_preemptions=0))
    driver = Driver(engine)
    driver.add("running", ids([1]), params(6), priority=10)
    driver.step()
    driver.add("waiting", ids([2]), params(2), priority=10)
    driver.add("urgent", ids([3]), params(2), priority=0)
    order = []
    while engine.core.has_work:
        order += [d.request_id for d in driver.step() if d.finish_reason]
    assert order == ["running", "urgent", "waiting"]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (3, 8, 13)])
def test_sch_05_fcfs_keeps_the_order_of_arrival(overlap, lengths):
    """With few blocks and in spite of preemptions and priorities, prompts are started in order of arrival; of prompts
    of the same length the first tokens come in that order. Pinned: a short prompt may overtake a longer one that was
    started before it and is still computed in chunks."""
    engine, ledger = ledgered(config(max_num_seqs=3, num_blocks=12, chunk_size=4, overlap=overlap))
    driver, order = Driver(engine), []
    for i in range(12):
        driver.add(str(i), ids([i] * lengths[i % 3]), params(12), priority=12 - i)
    while engine.core.has_work:
        order += [d.request_id for d in driver.step() if d.token_ids]
    driver.drain()
    arrival = [str(i) for i in range(12)]
    started = [row.seq.request.request_id for plan in ledger.plans for row in plan.rows]
    assert list(dict.fromkeys(started)) == arrival
    if len(set(lengths)) == 1:
        assert list(dict.fromkeys(order)) == arrival
    assert engine.core.stats.preemptions > 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_preempted_requests_are_not_passed_by_new_ones(overlap):
    """A steady stream of arrivals does not starve the first ones: they finish in order of arrival."""
    engine, _ = ledgered(config(max_num_seqs=4, num_blocks=9, overlap=overlap))
    driver, finished = Driver(engine), []
    arrivals = itertools.count()
    for step in range(400):
        if step % 4 == 0 and step < 120:
            i = next(arrivals)
            driver.add(str(i), ids([i, i + 1, i + 2, i + 3]), params(12))
        finished += [int(d.request_id) for d in driver.step() if d.finish_reason]
    driver.drain()
    assert finished == sorted(finished)
    assert engine.core.stats.preemptions > 0


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_outputs_are_the_same_with_few_blocks(overlap, policy, caching):
    """SCH-04: preemptions by memory, by slots and by both leave every output as it is alone."""
    settings: EngineConfig = config(
        num_blocks=9, max_num_seqs=3, chunk_size=4, policy=policy, overlap=overlap, prefix_caching=caching
    )
    engine, _ = ledgered(settings)
    prompts = [[*range(6), *([i] * (i % 5))] for i in range(10)]
    jobs = [
        Job(ids(p), params(14 - i), at=2 * i, priority=i % 3, request_id=str(i))
        for i, p in enumerate(prompts)
    ]
    outputs = run(engine, jobs)
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == solo(str(i), prompts[i], 14 - i)
    assert engine.core.stats.preemptions > 0
