"""Roles and addresses: what is wrong is told with its place and with what is allowed."""

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.config_values import ConfigError

DECODE = {"role": "decode", "peers": ["tcp://127.0.0.1:5600"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"disaggregation": {"role": "decode"}}, "peers names no prefill engine"),
        (
            {"disaggregation": {"role": "prefill", "peers": ["tcp://h:1"]}},
            "asked by the roles decode and both",
        ),
        ({"disaggregation": {"role": "prefill", "bind": "localhost"}}, "'localhost' is no address"),
        ({"disaggregation": {**DECODE, "peers": ["http://h:1"]}}, "'http://h:1' is no address"),
        (
            {"disaggregation": {**DECODE, "transport": "jax", "quantization": "int8"}},
            "allowed are host and nixl",
        ),
        ({"disaggregation": {**DECODE, "peers": ["tcp://h:1", "tcp://h:1"]}}, "names an engine twice"),
        (
            {"disaggregation": {"role": "prefill", "transport": "jax", "bind": "tcp://0.0.0.0:5600"}},
            "bind is tcp://0.0.0.0:5600, but data_host is 127.0.0.1",
        ),
        (
            {"disaggregation": {**DECODE, "transport": "jax", "peers": ["tcp://h:1"], "data_host": "::1"}},
            "peers is tcp://h:1, but data_host is ::1",
        ),
        ({"disaggregation": {**DECODE, "heartbeat": 1e9}}, "less than or equal to 86400"),
        ({"disaggregation": DECODE, "parallel": {"pipeline": 2}}, "allowed is pipeline 1"),
        ({"disaggregation": DECODE, "parallel": {"context": 2}}, "allowed is context 1"),
        (
            {
                "disaggregation": DECODE,
                "parallel": {"tensor": 2},
                "hosts": {"count": 2, "rank": 0, "coordinator": "127.0.0.1:5700"},
            },
            "several hosts do not travel",
        ),
        (
            {"disaggregation": DECODE, "speculative": {"drafter": "model", "model": "m"}},
            "speculative.model is set",
        ),
    ],
)
def test_what_does_not_go_together(values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.load("some/model", values)


@pytest.mark.parametrize(
    "values",
    [
        {"role": "prefill", "bind": "tcp://[::1]:5600"},
        {"role": "prefill", "bind": "ipc:///tmp/socket"},
        {**DECODE, "peers": ["tcp://localhost:5600", "tcp://127.0.0.2:5600"]},
        {**DECODE, "peers": ["tcp://h:1"], "data_host": "10.0.0.1"},
    ],
    ids=str,
)
def test_addresses_that_the_other_engine_can_reach(values) -> None:
    assert EngineConfig.load("some/model", {"disaggregation": {**values, "transport": "jax"}})


@pytest.mark.parametrize("name", ["disaggregated-prefill", "disaggregated-decode"])
def test_the_examples_can_be_read(name) -> None:
    config = EngineConfig.load(f"configs/{name}.yaml")
    assert f"disaggregated-{config.disaggregation.role}" == name
