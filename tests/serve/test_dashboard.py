"""The dashboard over HTTP: its page and its data."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxinfer.engine.snapshots import HELD
from serve.dashboard.history import Sample
from tests.support import tiny_checkpoint
from tests.support.serve_process import EventReader, serve_process
from tests.support.servers import Server, running_server
from tests.support.talker import STEP, put_load, talker
from tests.support.variants import variants

pytestmark = pytest.mark.feature("http", "dashboard")

LATENCY = Sample._fields.index("e2e_p50")


def wait_for_state(server: Server, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(100):
        state = server.client.get("/dashboard/data").json()
        if state["samples"] and condition(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"not within 10 s: {state}")


# ---- over HTTP


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(talker()) as running:
        yield running


def test_page_is_html_with_a_policy(server):
    response = server.client.get("/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_data_has_state_history_steps_and_pool(server):
    put_load(server)
    state = wait_for_state(server, lambda state: state["samples"][-1][LATENCY] is not None)
    assert state["error"] is None
    assert state["facts"]["num_blocks"] == len(state["blocks"]["cells"]) == 255
    assert sum(state["blocks"]["counts"]) == 255
    assert state["totals"]["requests"] == sum(state["finished"].values()) >= 3
    samples = [dict(zip(state["sample_fields"], row)) for row in state["samples"]]
    assert [s["number"] for s in samples] == list(range(len(samples)))
    assert max(s["output_rate"] for s in samples) > 0
    newest = samples[-1]
    assert STEP * 0.5 < newest["itl_p50"] <= newest["itl_p95"] <= newest["e2e_p95"]
    assert newest["ttft_p50"] <= newest["e2e_p50"]
    steps = [dict(zip(state["step_fields"], row)) for row in state["steps"]]
    assert sum(s["prefill"] + s["decode"] for s in steps) > 40
    assert all(s["start"] <= state["now"] for s in steps)


def test_data_is_read_on_from_a_sample(server):
    first = wait_for_state(server, lambda state: len(state["samples"]) > 1)["samples"]
    rest = server.client.get("/dashboard/data", params={"since": first[-1][0]}).json()["samples"]
    assert rest[0] == first[-1]
    assert len(rest) <= 3
    assert server.client.get("/dashboard/data", params={"since": 10**9}).json()["samples"] == []


@pytest.mark.parametrize("since", ["-1", "x", "1.5"])
def test_a_wrong_position_is_a_400(server, since):
    response = server.client.get("/dashboard/data", params={"since": since})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "since"


def test_page_is_public_and_data_is_not():
    with running_server(talker(), api_keys=("k1", "k2")) as locked:
        assert locked.client.get("/dashboard").status_code == 200
        assert locked.client.get("/dashboard/data").status_code == 401
        headers = {"Authorization": "Bearer k2"}
        assert locked.client.get("/dashboard/data", headers=headers).status_code == 200


def test_dashboard_can_be_switched_off():
    with running_server(talker(), dashboard=False) as bare:
        assert bare.client.get("/dashboard").status_code == 404
        assert bare.client.get("/dashboard/data").status_code == 404


@pytest.mark.parametrize("where", variants(["process", "thread"], quick=["process"]))
def test_a_real_server_keeps_history_and_tells_steps_and_blocks(tmp_path, where):
    """``jaxinfer serve`` samples from its start on; the engine's process sends steps and the pool map."""
    with serve_process(tiny_checkpoint.write(tmp_path / "tiny"), {"server.engine": where}) as server:
        time.sleep(2.2)
        assert len(server.get("/dashboard/data").json()["samples"]) >= 2
        stream = EventReader(server, max_tokens=2000)
        stream.wait_for(800)  # the map of the blocks is drawn once a second
        while_running = server.get("/dashboard/data").json()
        assert while_running["blocks"]["counts"][HELD] > 0
        assert sum(while_running["blocks"]["counts"]) == while_running["facts"]["num_blocks"] == 2047
        assert while_running["steps"]
        assert while_running["facts"]["engine"] == where
        server.signal(signal.SIGTERM)
