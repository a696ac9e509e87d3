"""docs/from_vllm.md is true: its tables and snippets are read and tried."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from pydantic import BaseModel

from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import build_engine
from serve.cli import app
from serve.overrides import parse_overrides
from serve.protocol.chat import ChatRequest
from serve.protocol.completions import CompletionRequest
from tests.support.servers import Server, running_server
from tests.support.text_models import save_text_model, text_model_config

pytestmark = pytest.mark.feature("vLLM names")

PAGE = (Path(__file__).parent.parent.parent / "docs" / "from_vllm.md").read_text()


def _section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _rows(title: str) -> list[list[str]]:
    """Cells of the table in a section, without its head."""
    lines = [line for line in _section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _blocks() -> list[tuple[bool, str]]:
    """Python blocks: whether they are ours, and their text."""
    found = re.findall(r"```python( run)?\n(.*?)```", PAGE, re.DOTALL)
    return [(bool(ours), text) for ours, text in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_text_model(folder, 256)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    config = text_model_config(model, **{"server.vllm_metrics": True})
    with running_server(build_engine(config, lambda *progress: None)) as running:
        body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
        assert running.client.post("/v1/completions", json=body).status_code == 200
        yield running


# Command line


def test_the_page_has_all_its_tables():
    sizes = {name: len(_rows(name)) for name in ("Command line", "Endpoints", "Request fields", "Metrics")}
    assert min(sizes.values()) > 15, sizes


@pytest.mark.parametrize("cell", [row[2] for row in _rows("Command line")])
def test_options_exist_and_take_the_values_shown(cell, tmp_path):
    """Options with a scope are loaded as a configuration; the others belong to the command. Files named ``FILE`` and
    directories named ``DIRECTORY`` are not looked at before the start."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for code in _code(cell):
        words = code.split(" ")
        if words[0] == "jaxinfer":
            command = commands[words[1]]
            if words[1] == "bench":
                assert words[2] in command.commands
                continue
            words = words[2:]
        options = {name for parameter in commands["serve"].params for name in parameter.opts}
        own = [word for word in words if word.startswith("--") and "." not in word]
        assert set(own) <= options
        if words and "." in words[0]:
            EngineConfig.load("model", parse_overrides(words))
    if not _code(cell):
        assert cell in ("no", "always on", "llguidance, always")


# Endpoints


@pytest.mark.parametrize("row", _rows("Endpoints"), ids=lambda row: row[0])
def test_paths_exist_or_are_not_found(server, row):
    (path,) = _code(row[0])
    known = set(server.client.get("/openapi.json").json()["paths"])
    assert row[3].startswith(("yes", "no"))
    assert (path in known) == row[3].startswith("yes")
    if row[3] == "no":
        assert server.client.post(path, json={}).status_code == 404


# Request fields


@pytest.mark.parametrize("row", _rows("Request fields"), ids=lambda row: row[0])
def test_fields_are_known_where_the_page_says_so_and_refused_elsewhere(server, row):
    (name,) = _code(row[0])
    bodies: list[tuple[str, type[BaseModel], str, dict[str, object]]] = [
        ("/v1/completions", CompletionRequest, row[1], {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", ChatRequest, row[2], {"messages": [{"role": "user", "content": "a"}]}),
    ]
    for path, request, cell, body in bodies:
        assert cell in ("yes", "no")
        known = {field.alias or key for key, field in request.model_fields.items()}
        assert (name in known) == (cell == "yes"), f"{path}: {name}"
        if cell == "no":
            answer = server.client.post(path, json={**body, name: {"a": 1}})
            assert answer.status_code == 400
            assert name in answer.text


# Metrics


def test_every_metric_is_exported_under_both_names(server):
    names = {
        line.split("{")[0].split(" ")[0]
        for line in server.client.get("/metrics").text.splitlines()
        if line[:1] != "#"
    }
    for theirs, _, ours in _rows("Metrics"):
        (name,) = _code(ours)
        assert _exported(f"jaxinfer:{name}", names), name
        if theirs == "no":
            assert not _exported(f"vllm:{name}", names), f"vllm:{name} is ours alone"
        else:
            assert _exported(f"vllm:{_code(theirs)[0]}", names), theirs


def _exported(name: str, names: set[str]) -> bool:
    return name in names or f"{name}_bucket" in names


def test_every_exported_metric_is_on_the_page(server):
    text = server.client.get("/metrics").text
    families = re.findall(r"^# TYPE jaxinfer:(\S+) \w+$", text, re.MULTILINE)
    listed = {_code(row[2])[0].removesuffix("_total") for row in _rows("Metrics")}
    ours_alone = {"http_requests", "http_request_duration_seconds", "engine_healthy", "requests_admitted"}
    ours_alone |= {"steps", "computed_tokens", "padded_tokens", "spec_decode_lossy"}
    assert {name.removesuffix("_total") for name in families} - ours_alone == listed


# Snippets


@pytest.mark.parametrize("text", [text for ours, text in _blocks() if not ours])
def test_snippets_of_others_are_python(text):
    ast.parse(text)


@pytest.mark.parametrize("text", [text for ours, text in _blocks() if ours])
def test_our_snippets_run(text, model, server, monkeypatch, capsys):
    # The shapes of the server's engine, so that its compiled programs are found.
    settings = {
        "MODEL__DTYPE": "float32",
        "CACHE__NUM_BLOCKS": "257",
        "SCHEDULER__MAX_NUM_SEQS": "8",
        "SCHEDULER__MAX_NUM_BATCHED_TOKENS": "64",
        "COMPILE__WARM_UP": "lazy",
        "COMPILE__CACHE_DIR": "none",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"JAXINFER_{name}", value)
    code = text.replace("path/to/model", str(model)).replace("http://127.0.0.1:8000", server.url)
    assert code != text
    exec(compile(code, "docs/from_vllm.md", "exec"), {"__name__": "snippet"})
