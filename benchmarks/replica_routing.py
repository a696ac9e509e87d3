"""Prefix hit rates of routing policies: tenants with long system prompts and conversations of several turns, on
replicas whose caches hold a part of it all.

Real HTTP, ingresses, router and engines around a cost model, on a local Ray cluster::

    python -m benchmarks.replica_routing

Needs the extra ``ray``. A turn sends the whole conversation again, as chat clients do, with the answers so far.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from benchmarks import simulated_engine
from benchmarks.server_child import free_port
from serve.run import EngineSource

NAME = "simulated"
VOCABULARY = range(1000, 30000)


@dataclass(frozen=True)
class Load:
    """Attributes:
    replicas: of the model.
    blocks: of the pool of each, of 16 tokens.
    tenants: with a system prompt of ``system`` tokens each.
    conversations: of each tenant.
    turns: of a conversation, each of ``user`` new tokens and an answer of ``answer``.
    clients: conversations at a time.
    """

    replicas: int = 4
    blocks: int = 384
    tenants: int = 48
    system: int = 768
    conversations: int = 2
    turns: int = 8
    user: int = 48
    answer: int = 16
    clients: int = 16


SMALL = Load(blocks=256, tenants=16, system=512, conversations=1, turns=5, clients=12)


@dataclass(frozen=True)
class Row:
    """Attributes:
    hit_rate: prompt tokens that prefix caches had, of all.
    computed: tokens that all engines computed.
    busiest_share: of the requests, those of the replica with most of them.
    first_token: mean seconds to it.
    """

    policy: str
    requests: int
    hit_rate: float
    computed: int
    busiest_share: float
    first_token: float
    seconds: float


class Cluster(Protocol):
    """A Ray cluster with Ray Serve."""

    @property
    def url(self) -> str: ...

    def deploy(self, config: dict[str, Any], source: EngineSource | None = None) -> None: ...

    def remove(self) -> None: ...


def compare(cluster: Cluster, load: Load) -> list[Row]:
    """The same load with each policy, on fresh replicas."""
    return [_measure(cluster, load, policy) for policy in ("round_robin", "prefix")]


def render(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [
        "| policy | requests | prefix hits | tokens computed | requests of the busiest replica | mean TTFT | time |",
        "|---|---|---|---|---|---|---|",
    ]
    body = [
        f"| {row.policy} | {row.requests} | {row.hit_rate:.1%} | {row.computed} | {row.busiest_share:.0%} "
        f"| {1000 * row.first_token:.0f} ms | {row.seconds:.1f} s |"
        for row in rows
    ]
    return "\n".join(lines + body)


def _measure(cluster: Cluster, load: Load, policy: str) -> Row:
    config = simulated_engine.configuration("thread", 0).model_dump(exclude_unset=True)
    overrides = {f"{scope}.{key}": value for scope, values in config.items() for key, value in values.items()}
    model = {
        "config": overrides.pop("model.reference"),
        "overrides": {**overrides, "cache.num_blocks": load.blocks + 1},
        "scaling": {"min_replicas": load.replicas, "max_replicas": load.replicas},
        "routing": {"policy": policy, "remembered_blocks": load.blocks},
        "resources": {"num_cpus": 0},
    }
    source = EngineSource((sys.executable, "-m", "benchmarks.simulated_engine"), simulated_engine.build)
    cluster.deploy({"models": [model], "ingress": {"replicas": 2, "num_cpus": 0}}, source)
    try:
        start = time.monotonic()
        requests = asyncio.run(_drive(cluster.url, load))
        return _row(cluster.url, policy, requests, time.monotonic() - start)
    finally:
        cluster.remove()


async def _drive(url: str, load: Load) -> int:
    """Runs all conversations, in an order that mixes the tenants; returns the number of requests."""
    rng = random.Random(0)
    systems = [_tokens(rng, load.system) for _ in range(load.tenants)]
    waiting = [(system, rng.random()) for system in systems for _ in range(load.conversations)]
    waiting.sort(key=lambda item: item[1])
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            while waiting:
                system, _ = waiting.pop()
                await _converse(client, system, load, random.Random(1000 * number + len(waiting)))

        await asyncio.gather(*(work(number) for number in range(load.clients)))
    return load.tenants * load.conversations * load.turns


async def _converse(client: httpx.AsyncClient, system: list[int], load: Load, rng: random.Random) -> None:
    prompt = list(system)
    for _ in range(load.turns):
        prompt += _tokens(rng, load.user)
        body = {"prompt": prompt, "max_tokens": load.answer, "ignore_eos": True, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        prompt += answer.json()["choices"][0]["token_ids"]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(VOCABULARY, k=count)


def _row(url: str, policy: str, requests: int, seconds: float) -> Row:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    admitted = _values(text, "requests_admitted_total")
    # Each ingress measures the calls that went through it; means of the one that answers are as good as any.
    firsts = (
        sum(_values(text, "time_to_first_token_seconds_count")),
        sum(_values(text, "time_to_first_token_seconds_sum")),
    )
    return Row(
        policy=policy,
        requests=requests,
        hit_rate=sum(_values(text, "prefix_cache_hits_total"))
        / max(sum(_values(text, "prefix_cache_queries_total")), 1),
        computed=int(sum(_values(text, "computed_tokens_total"))),
        busiest_share=max(admitted) / sum(admitted),
        first_token=firsts[1] / max(firsts[0], 1),
        seconds=seconds,
    )


def _values(text: str, name: str) -> list[float]:
    return [
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"jaxinfer:{name}{{")
    ]


class _Local:
    """A cluster of this machine."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, config: dict[str, Any], source: EngineSource | None = None) -> None:
        from ray import serve

        from serve.replicas.config import ReplicasConfig
        from serve.replicas.ray_app import NAME, application

        serve.run(application(ReplicasConfig.of(config), source), name=NAME, route_prefix="/")

    def remove(self) -> None:
        from ray import serve

        from serve.replicas.ray_app import NAME

        serve.delete(NAME)


@contextmanager
def _local() -> Iterator[_Local]:
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield _Local(port)
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="the load of the tests")
    options = parser.parse_args()
    with _local() as cluster:
        print(render(compare(cluster, SMALL if options.small else Load())))


if __name__ == "__main__":
    main()
