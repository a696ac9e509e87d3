"""The HTTP application of an ingress, with replicas in this process: the surface is that of a server."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from jaxinfer.config import ServerConfig
from jaxinfer.config_values import ConfigError
from jaxinfer.runner.simulated import CostModel
from serve.replicas.app import ServedModel, create_ingress
from serve.replicas.client import ReplicasClient
from serve.replicas.config import ModelPool
from tests.support import engines
from tests.support.fleet import Fleet

pytestmark = pytest.mark.feature("replicas")

BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}


def settings(*names: str):
    base = engines.config()
    return base.model_copy(update={"server": ServerConfig(served_model_names=names)})


def serve(
    scenario: Callable[[httpx.AsyncClient], Awaitable[None]],
    *models: tuple[str, ...],
    fleet_type: type[Fleet] = Fleet,
    **server,
) -> None:
    async def main() -> None:
        fleets, served = [], []
        for names in models:
            pool, config = ModelPool(config="test"), settings(*names)
            fleet = fleet_type(pool, lambda: engines.simulated(engines.config(), CostModel(base=0.001)), "ab")
            served.append(ServedModel(config, await ReplicasClient.start(config, pool, fleet)))
            fleets.append(fleet)
        app = create_ingress(served, ServerConfig(**server), "ing0")
        transport = httpx.ASGITransport(app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await asyncio.wait_for(scenario(client), 60)
        finally:
            for model, fleet in zip(served, fleets):
                await model.client.shutdown()
                await fleet.stop()

    asyncio.run(main())


def test_one_model_answers_as_a_server_does():
    async def scenario(client):
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == 4
        assert answer.headers["x-request-id"]
        streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        for path in ("/health", "/ready", "/version", "/v1/models", "/openapi.json", "/load"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/load")).json()["running"] == 0
        assert (await client.post("/reset_prefix_cache")).json()["blocks"] >= 0
        wrong = await client.post("/v1/completions", json={**BODY, "prompt": [5000]})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "prompt"
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.get("/nowhere")).json()["error"]["message"] == "GET /nowhere: no such endpoint"
        assert (await client.delete("/health")).status_code == 405
        assert (await client.post("/start_profile")).status_code == 404

    serve(scenario, ("one",))


def test_probes_may_ask_with_head():
    async def scenario(client):
        for path in ("/health", "/ready"):
            answer = await client.head(path)
            assert answer.status_code == 200, path

    serve(scenario, ("one",), ("two",))


def test_the_openapi_document_is_that_of_a_server():
    async def scenario(client):
        document = (await client.get("/openapi.json")).json()
        shared = {"/v1/models", "/health", "/ready", "/load", "/metrics", "/reset_prefix_cache"}
        assert shared | {"/v1/chat/completions", "/v1/completions", "/version"} <= set(document["paths"])
        assert "Error" in document["components"]["schemas"]

    serve(scenario, ("one",), ("two",))


def test_one_replica_that_hangs_does_not_make_all_disappear(monkeypatch):
    class Hanging(Fleet):
        hangs = False

        async def reports(self):
            if self.hangs:
                raise TimeoutError("a replica does not answer within 5 s")
            return await super().reports()

        async def reset_prefix_cache(self):
            await self.reports()
            return await super().reset_prefix_cache()

    async def scenario(client):
        def engines_of(text: str) -> int:
            return text.count("\njaxinfer:engine_healthy{")

        assert engines_of((await client.get("/metrics")).text) == 2
        monkeypatch.setattr(Hanging, "hangs", True)
        assert engines_of((await client.get("/metrics")).text) == 2
        assert (await client.get("/ready")).status_code == 200
        reset = await client.post("/reset_prefix_cache")
        assert reset.status_code == 503
        assert reset.json()["error"]["message"].endswith("a replica does not answer within 5 s")
        monkeypatch.setattr("serve.replicas.client.KEEP_REPORTS", -1.0)
        assert (await client.get("/ready")).status_code == 503, "for too long"
        assert engines_of((await client.get("/metrics")).text) == 0
        monkeypatch.setattr(Hanging, "hangs", False)
        assert (await client.get("/ready")).status_code == 200

    serve(scenario, ("one",), fleet_type=Hanging)


def test_calls_go_to_the_model_that_they_name():
    async def scenario(client):
        names = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert names == ["one", "uno", "two"]
        assert (await client.get("/v1/models/uno")).json()["root"] == "one"
        assert (await client.get("/v1/models/three")).status_code == 404
        for name, shown in ((None, "one"), ("uno", "uno"), ("two", "two"), ("two", "two")):
            answer = await client.post("/v1/completions", json={**BODY, "model": name})
            assert answer.json()["model"] == shown
        unknown = await client.post("/v1/completions", json={**BODY, "model": "three"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["param"] == "model"
        assert unknown.json()["error"]["message"].endswith("this server has: one, uno, two")
        for body in (b"{", b"[]", b"\xff", b'{"model": 3}', b""):
            answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == 400, body

        text = (await client.get("/metrics")).text
        admitted = [
            line for line in text.splitlines() if line.startswith("jaxinfer:requests_admitted_total{")
        ]
        assert len(admitted) == 4, "one of each replica"
        assert sum(float(line.split()[-1]) for line in admitted if 'model_name="two"' in line) == 2
        assert text.count("# TYPE jaxinfer:requests_admitted_total counter") == 1
        assert 'jaxinfer:time_to_first_token_seconds_count{engine="ing0",model_name="one"} 2.0' in text
        calls = 'jaxinfer:http_requests_total{ingress="ing0",method="POST",route='
        assert calls + '"/v1/completions",status="200"} 4.0' in text
        assert calls + '"unmatched",status="404"} 1.0' in text, "it reached no model"

    serve(scenario, ("one", "uno"), ("two",))


def test_keys_and_limits_are_those_of_the_ingress():
    async def scenario(client):
        assert (await client.post("/v1/completions", json={**BODY, "model": "two"})).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        key = {"Authorization": "Bearer k"}
        assert (
            await client.post("/v1/completions", json={**BODY, "model": "two"}, headers=key)
        ).status_code == 200
        long = {**BODY, "model": "two", "prompt": [1] * 1000}
        assert (await client.post("/v1/completions", json=long, headers=key)).status_code == 413

    serve(scenario, ("one",), ("two",), api_keys=("k",), max_body_bytes=500)


def test_names_must_differ():
    async def nothing(_: httpx.AsyncClient) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match="several models are served as same"):
        serve(nothing, ("same",), ("other", "same"))
