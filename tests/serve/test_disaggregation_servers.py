"""``jaxinfer serve`` in the roles prefill and decode, each a process with an engine process of its own."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_checkpoint
from tests.support.serve_process import ServeProcess, serve_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.feature("disaggregation", "http")]

PROMPTS = ["a long prompt " * 9, "a long prompt " * 9 + "and something more " * 5, "short"]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def wanted_blocks(num_tokens: int) -> int:
    """Of a prompt: all but its last token."""
    return -(-(num_tokens - 1) // 16)


def answers(server: ServeProcess) -> list[str]:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    responses = [server.complete(prompt=prompt, **values) for prompt in PROMPTS]
    assert [response.status_code for response in responses] == [200] * len(PROMPTS)
    return [response.json()["choices"][0]["text"] for response in responses]


def metric(server: ServeProcess, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"jaxinfer:{name}{{"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model") / "tiny")


def role(name: str, address: str, **values: Any) -> dict[str, Any]:
    where = "bind" if name == "prefill" else "peers"
    value = address if name == "prefill" else f"[{address}]"
    options = {"role": name, where: value, "min-tokens": 32, "timeout": 120, "heartbeat": 10, **values}
    return {f"disaggregation.{key}": value for key, value in options.items()}


def test_servers_say_what_one_says_and_count_what_they_moved(model) -> None:
    address = free_address()
    with serve_process(model, simulated=False) as one:
        expected = answers(one)
    with (
        serve_process(model, role("prefill", address), simulated=False) as prefill,
        serve_process(model, role("decode", address), simulated=False) as decode,
    ):
        assert answers(decode) == expected
        blocks = wanted_blocks(len(PROMPTS[0])) + wanted_blocks(len(PROMPTS[1])) - len(PROMPTS[0]) // 16
        assert metric(decode, "kv_received_blocks_total") == metric(prefill, "kv_sent_blocks_total") == blocks
        assert metric(decode, "kv_received_bytes_total") == blocks * 2 * 2 * 2 * 16 * 16 * 4
        assert metric(decode, "kv_fetches_total") == metric(prefill, "kv_jobs_total") == 2
        assert metric(decode, "kv_fetch_failures_total") == metric(prefill, "kv_job_failures_total") == 0
        for server in (decode, prefill):
            assert metric(server, "kv_cache_usage_perc") == 0
        prefill.process.kill()
        assert answers(decode) == expected


def test_a_prefill_server_that_is_told_to_stop_ends_its_prompts(model) -> None:
    """Signals come while prompts are computed, and in between; no fetch fails that was taken."""
    address = free_address()
    prompts = [f"{i} " * 200 for i in range(4)]
    with (
        serve_process(model, role("prefill", address), simulated=False) as prefill,
        serve_process(model, role("decode", address), simulated=False) as decode,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        values: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        asked = [pool.submit(decode.complete, prompt=prompt, **values) for prompt in prompts]
        while metric(prefill, "kv_jobs_total") == 0:
            time.sleep(0.01)
        prefill.process.terminate()
        assert [response.result().status_code for response in asked] == [200] * len(prompts)
        assert prefill.exit_status(120) == 0
        assert decode.complete(prompt="and another one " * 20, **values).status_code == 200
        fetches, failed = (metric(decode, f"kv_fetch{kind}_total") for kind in ("es", "_failures"))
        assert fetches >= 1
        assert failed < fetches
        assert "the prefill engine stops" not in decode.text()


def test_engines_that_do_not_fit_are_an_error_that_names_both(model) -> None:
    address = free_address()
    with (
        serve_process(model, role("prefill", address), simulated=False),
        serve_process(
            model, {**role("decode", address), "cache.block-size": 32}, simulated=False, wait=False
        ) as decode,
    ):
        assert decode.exit_status(300) == 2
        assert "block_size is 32 here and 16 there" in decode.text().replace("\n", " ")
