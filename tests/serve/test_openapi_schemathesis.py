"""Schemathesis against our OpenAPI document: whatever fits it, or just does not, gets an answer that it documents.

It is looked for in this environment and in that of ``make compat`` (see ``test_third_party_clients.py``).
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parrot import parrot_engine
from tests.support.servers import Server, running_server

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("JAXINFER_COMPAT_VENV", ROOT / ".venv-compat"))


def find_python() -> str | None:
    """The Python of the first environment that has Schemathesis."""
    if importlib.util.find_spec("schemathesis") is not None:
        return sys.executable
    return str(VENV / "bin" / "python") if (VENV / "bin" / "schemathesis").exists() else None


PYTHON = find_python()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.feature("http", "openapi"),
    pytest.mark.skipif(PYTHON is None, reason="schemathesis is not installed; run make compat"),
]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
SECONDS = 90


def warm_up(server: Server) -> None:
    """Compiles the programs, so that the time limit of a request measures the server."""
    for fields in ({}, {"logprobs": True, "prompt_logprobs": 1, "response_format": {"type": "json_object"}}):
        body = {"messages": [{"role": "user", "content": "<anything>"}], "max_tokens": 4, **fields}
        assert server.client.post("/v1/chat/completions", json=body, timeout=300).status_code == 200


def test_no_5xx_and_no_undocumented_answer(tmp_path):
    assert PYTHON is not None
    with running_server(parrot_engine(), max_body_bytes=1_000_000) as server:
        warm_up(server)
        command = [
            *(PYTHON, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-time", str(SECONDS)),
            *(
                "--request-timeout",
                "30",
                "--continue-on-failure",
                "--generation-database",
                "none",
                "--no-color",
            ),
        ]
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS + 120, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Tested: " in result.stdout
        assert server.client.get("/health").status_code == 200
