"""Random requests, settings, aborts and cache resets: the ledger sees every step, and nothing leaks."""

import random

import pytest

from jaxinfer.request import QueueFullError, RequestError
from tests.support.engines import Driver, config, ids, token_params
from tests.support.ledger import Ledger, ledgered

WINDOWS = [(None,), (None,), (8, None), (8,), (4, 8, None)]


def random_engine(rng: random.Random):
    chunk = rng.choice([None, 3, 4, 8])
    settings = config(
        block_size=rng.choice([2, 4]),
        num_blocks=rng.randint(8, 30),
        prefix_caching=rng.random() < 0.8,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([6, 9, 16, 32]),
        chunk_size=chunk,
        policy=rng.choice(["fcfs", "priority"]),
        max_preemptions=rng.randint(0, 3),
        overlap=rng.randint(0, 1),
        max_waiting_seqs=rng.choice([None, None, 8]),
    )
    return ledgered(settings, windows=rng.choice(WINDOWS))


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts that share beginnings of any length, also inside blocks."""
    base = [rng.randint(0, 1)] * 3 + [7] * 20
    return [*base[: rng.randint(1, 20)], *(rng.randint(0, 2) for _ in range(rng.randint(0, 6)))]


def add_request(rng: random.Random, driver: Driver, name: str) -> None:
    max_tokens = rng.choice([0, 1, 2, 5, 12, 20])
    params = token_params(
        temperature=1.0,
        seed=rng.randint(0, 3),
        n=rng.choice([1, 1, 1, 2, 4]),
        max_tokens=max_tokens,
        ignore_eos=True,
        skip_reading_prefix_cache=rng.random() < 0.2,
    )
    prompt = {**ids(random_prompt(rng))}
    if rng.random() < 0.2:
        prompt["cache_salt"] = rng.choice(["a", "b"])
    driver.add(name, prompt, params, rng.randint(0, 3))


def check_cached(driver: Driver, ledger: Ledger) -> None:
    ledger.check_cached(list(driver.engine.core.scheduler.kv.cache._nodes.values()))


@pytest.mark.parametrize("seed", range(40))
def test_sch_07_random_schedules(seed):
    rng = random.Random(seed)
    engine, ledger = random_engine(rng)
    driver = Driver(engine)
    for step in range(rng.randint(20, 80)):
        for i in range(rng.choice([0, 0, 1, 3])):
            try:
                add_request(rng, driver, f"{step}.{i}")
            except (RequestError, QueueFullError):
                continue
        driver.step()
        check_cached(driver, ledger)
        if rng.random() < 0.1 and driver.deltas:
            driver.abort(rng.choice(list(driver.deltas)))
        if rng.random() < 0.02:
            engine.core.scheduler.kv.reset_prefix_cache()
    driver.drain()
    for name, deltas in driver.deltas.items():
        reasons = driver.finishes(name)
        assert set(reasons) <= {"length", "abort"}
        assert len(reasons) == len({d.index for d in deltas})
