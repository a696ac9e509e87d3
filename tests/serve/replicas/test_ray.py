"""Replicas on a real, small Ray cluster: what happens when one dies, an update, scaling, routing, several models."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ray = pytest.importorskip("ray", reason="the extra ray is not installed; make test-replicas installs it")

from benchmarks import replica_routing  # noqa: E402
from tests.support import ray_cluster, replica_engine, tiny_checkpoint  # noqa: E402
from tests.support.ray_cluster import Cluster, Streamed, eventually, stream, until  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.feature("replicas")]

STEP = 0.05
MODEL = "sim"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.cluster() as running:
        yield running


@pytest.fixture(autouse=True)
def _removed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.remove()


def pool(
    name: str = MODEL, replicas: int = 2, engine: dict[str, Any] | None = None, **values: Any
) -> dict[str, Any]:
    return {
        "config": "test",
        "overrides": replica_engine.overrides(name, **(engine or {})),
        "scaling": {"min_replicas": replicas, "max_replicas": replicas},
        "resources": {"num_cpus": 0},
        **values,
    }


def fleet(*pools: dict[str, Any]) -> dict[str, Any]:
    return {"models": list(pools), "ingress": {"replicas": 2, "num_cpus": 0}}


def kill_under_load(cluster: Cluster) -> tuple[list[Streamed], set[int]]:
    """64 requests on two replicas with eight slots; one is killed when some have begun and most have not. Returns the
    streams, and the numbers of those that had begun by then."""
    seen = [Streamed() for _ in range(64)]

    async def main() -> set[int]:
        async with ray_cluster.http(cluster.url) as client:
            tasks = [
                asyncio.create_task(stream(client, {"prompt": [9, i, 5], "max_tokens": 40}, into))
                for i, into in enumerate(seen)
            ]
            await eventually(lambda: sum(bool(s.token_ids) for s in seen) >= 4)
            running = await asyncio.to_thread(cluster.metric, "num_requests_running", MODEL)
            begun = {i for i, s in enumerate(seen) if s.token_ids}
            cluster.kill(MODEL, max(running, key=lambda name: running[name]))
            await asyncio.gather(*tasks)
            return begun

    return seen, asyncio.run(main())


def test_a_replica_dies_under_load(cluster):
    cluster.deploy(fleet(pool()), replica_engine.source(STEP))
    seen, begun = kill_under_load(cluster)
    failed = [s for s in seen if not s.whole]
    assert 1 <= len(failed) <= 32, "what had begun on the killed replica"
    for s in failed:
        assert s.token_ids, "a request without a token is tried elsewhere"
        assert s.done, "the stream ends as streams end"
        assert s.error == "the replica that generated this answer was lost"
        assert s.finish_reason is None
    whole = [s for s in seen if s.whole]
    assert all(len(s.token_ids) == 40 and s.finish_reason == "length" for s in whole)
    took = until(lambda: len(cluster.metric("engine_healthy", MODEL)) == 2)
    print(f"{len(failed)} of {len(begun)} begun requests failed; a new replica was there {took:.1f} s later")


def test_a_replica_dies_and_its_requests_go_on(cluster):
    cluster.deploy(fleet(pool(on_loss="continue")), replica_engine.source(STEP))
    seen, _ = kill_under_load(cluster)
    assert [s.error for s in seen if s.error] == []
    assert {tuple(s.token_ids) for s in seen} == {tuple(seen[0].token_ids)}, "tokens follow from positions"
    assert len(seen[0].token_ids) == 40


def test_a_rolling_update_fails_no_request(cluster):
    cluster.deploy(fleet(pool()), replica_engine.source(0.01))
    seen: list[Streamed] = []

    async def main() -> None:
        over = asyncio.Event()

        async def work(client: httpx.AsyncClient, number: int) -> None:
            while not over.is_set():
                seen.append(Streamed())
                await stream(client, {"prompt": [number, 2], "max_tokens": 20}, seen[-1])

        before = set(await asyncio.to_thread(cluster.metric, "engine_healthy", MODEL))
        async with ray_cluster.http(cluster.url) as client:
            workers = [asyncio.create_task(work(client, i)) for i in range(6)]
            await eventually(lambda: len(seen) > 12)
            update = fleet(pool(engine={"num_blocks": 400}))
            await asyncio.to_thread(cluster.deploy, update, replica_engine.source(0.01))
            after = set(await asyncio.to_thread(cluster.metric, "engine_healthy", MODEL))
            assert not before & after, "all replicas are new"
            count = len(seen)
            await eventually(lambda: len(seen) > count + 12)
            over.set()
            await asyncio.gather(*workers)

    asyncio.run(main())
    assert [s.error or s.finish_reason for s in seen if not s.whole] == []
    assert all(len(s.token_ids) == 20 for s in seen)
    print(f"{len(seen)} requests during the update")


def test_one_replica_becomes_two_and_one_again(cluster):
    bounds = {"min_replicas": 1, "max_replicas": 2, "target_requests": 4}
    scaling = {**bounds, "look_back": 11, "upscale_delay": 1, "downscale_delay": 3}
    cluster.deploy(fleet(pool(scaling=scaling)), replica_engine.source(STEP))
    assert len(cluster.metric("engine_healthy", MODEL)) == 1
    seen = [Streamed() for _ in range(16)]

    async def main() -> float:
        async with ray_cluster.http(cluster.url) as client:
            tasks = [
                asyncio.create_task(stream(client, {"prompt": [i, 2], "max_tokens": 400}, into))
                for i, into in enumerate(seen)
            ]
            up = await asyncio.to_thread(until, lambda: len(cluster.metric("engine_healthy", MODEL)) == 2)
            await asyncio.gather(*tasks)
            return up

    up = asyncio.run(main())
    assert all(s.whole for s in seen)
    down = until(lambda: len(cluster.metric("engine_healthy", MODEL)) == 1)
    print(f"1 -> 2 after {up:.1f} s, 2 -> 1 {down:.1f} s after the load")


def test_prefix_routing_doubles_the_hits_of_round_robin(cluster):
    table = replica_routing.compare(cluster, replica_routing.SMALL)
    print(replica_routing.render(table))
    prefix, plain = (next(row for row in table if row.policy == p) for p in ("prefix", "round_robin"))
    assert prefix.hit_rate >= 2 * plain.hit_rate
    assert prefix.busiest_share < 0.5, "no hot spot among four"


def test_several_models_and_a_client_that_leaves(cluster):
    second = pool("other", 1, {"server.served_model_names": ["other", "alias"]})
    cluster.deploy(fleet(pool(replicas=1), second), replica_engine.source(STEP))
    names = [model["id"] for model in cluster.get("/v1/models").json()["data"]]
    assert names == ["sim", "other", "alias"]
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    for model, shown in (("sim", "sim"), ("alias", "alias"), (None, "sim")):
        answer = httpx.post(f"{cluster.url}/v1/completions", json={**body, "model": model}, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == shown
    unknown = httpx.post(f"{cluster.url}/v1/completions", json={**body, "model": "x"}, timeout=300)
    assert unknown.status_code == 404
    assert "this server has: sim, other, alias" in unknown.json()["error"]["message"]
    assert list(cluster.metric("requests_admitted_total", "sim").values()) == [2]
    assert list(cluster.metric("requests_admitted_total", "other").values()) == [1]

    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json={**body, "max_tokens": 400, "stream": True}, timeout=300
    ) as answer:
        lines = answer.iter_lines()  # which closes the answer when it goes
        next(lines)
        assert list(cluster.metric("num_requests_running", "sim").values()) == [1]
    until(lambda: list(cluster.metric("num_requests_running", "sim").values()) == [0], 60)
    assert 'finished_reason="abort",model_name="sim"} 1.0' in cluster.get("/metrics").text


def test_a_real_model_goes_on_exactly(cluster, tmp_path: Path):
    """Greedy text of a tiny Llama, with the replica that writes it killed in the middle."""
    values = {
        "server.served_model_names": [MODEL],
        "model.max_model_len": 1024,
        "cache.num_blocks": 257,
        "scheduler.max_num_seqs": 4,
        "scheduler.max_num_batched_tokens": 32,
        "compile.warm_up": "lazy",
    }
    config = {
        **pool(on_loss="continue"),
        "config": str(tiny_checkpoint.write(tmp_path / "tiny")),
        "overrides": values,
    }
    cluster.deploy(fleet(config))
    body = {"prompt": "the quick brown fox", "max_tokens": 600}
    whole, cut = Streamed(), Streamed()

    async def main() -> None:
        async with ray_cluster.http(cluster.url) as client:
            await stream(client, body, whole)
            running = await asyncio.to_thread(cluster.metric, "generation_tokens_total", MODEL)
            task = asyncio.create_task(stream(client, body, cut))
            await eventually(lambda: len(cut.token_ids) > 20)
            now = await asyncio.to_thread(cluster.metric, "generation_tokens_total", MODEL)
            cluster.kill(MODEL, max(now, key=lambda name: now[name] - running.get(name, 0)))
            await task

    asyncio.run(main())
    assert whole.whole, whole.error
    assert cut.whole, cut.error
    assert cut.token_ids == whole.token_ids
    assert len(whole.token_ids) == 600
