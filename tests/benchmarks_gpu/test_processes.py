"""The GPU benchmark from its command line, on the CPU: what it does on a device must be known before it meets one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import records
from benchmarks.gpu.settings import PARTS, Settings
from benchmarks.gpu.supervise import run_part

ROOT = Path(__file__).resolve().parents[2]
BARE = (
    "matplotlib",
    "flax",
    "pydantic",
    "msgspec",
    "yaml",
    "tokenizers",
    "jinja2",
    "gguf",
    "llguidance",
    "zmq",
)
"""What an image with JAX and NumPy does not have, as far as the engine imports it; and "rich"."""


def run(script: str, out: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a script; its time limits are generous, since a busy machine is no reason to fail."""
    command = [sys.executable, f"benchmarks/gpu/{script}", "--out", str(out), "--platform", "cpu", "--smoke"]
    return subprocess.run(
        [*command, "--threads", "2", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=560
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_runs_on_a_bare_image(tmp_path: Path) -> None:
    hidden = (*BARE, "rich", "optax", "orbax")
    process = run("run.py", tmp_path, "--minutes", "9", "--hide", *hidden)
    assert process.returncode == 0, process.stdout + process.stderr
    values = json.loads((tmp_path / "results.json").read_text())
    assert values["gpu"] == values["device"]["kind"] == "cpu"
    assert not values["failed"]
    assert not values["skipped"]
    assert {"copy", "launch", "matmul-bf16"} <= set(values["ceilings"])
    assert set(values["cases"]) == {
        f"smoke/triton/{name}" for name in ("doubled", "doubled-in-place", "more")
    }
    case = values["cases"]["smoke/triton/doubled"]
    assert case["max_error"] == 0
    assert case["seconds"] > 0
    assert case["baseline_seconds"] > 0
    steps = {(s["phase"], s["kernels"], s["command_buffers"]) for s in values["steps"]}
    assert steps == {("decode", "pallas", True), ("decode", "xla", True), ("decode", "pallas", False)}
    assert [t["output_tokens"] for t in values["throughput"]] == [15]
    assert {entry["package"] for entry in values["missing"]} == set(BARE)
    assert not list(tmp_path.glob("*.png"))
    table = (tmp_path / "results.txt").read_text()
    assert process.stdout.endswith(table + "\n")
    for text in ("smoke/triton/doubled", "tiny/decode-b2/pallas", "tiny/pallas", "matplotlib: no plots"):
        assert text in table


def test_no_time_at_all(tmp_path: Path) -> None:
    process = run("run.py", tmp_path, "--minutes", "0.1")
    assert process.returncode == 1
    values = json.loads((tmp_path / "results.json").read_text())
    assert not values["cases"]
    assert {name.split(":")[0] for name in values["skipped"]} == set(PARTS)
    assert "no time was left" in process.stdout


def test_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = run("run.py", tmp_path, "--platform", "cuda")
    assert process.returncode == 1
    assert "no device of platform 'cuda' was reached" in process.stdout
    assert "ceilings: (all): the part could not go on" in (tmp_path / "results.txt").read_text()


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> records.Results:
    """A part with cases that go wrong in different ways."""
    path = tmp_path_factory.mktemp("hard") / "records.jsonl"
    settings = Settings(
        part="kernels",
        records=path,
        deadline=time.time() + 500,
        platform="cpu",
        smoke=True,
        cases_from="tests.benchmarks_gpu.hard_cases",
        threads=3,
    )
    run_part(settings, settings.deadline + 5, lambda: None, case_seconds=25.0)
    return records.read(path)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestHardCases:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("wrong", "differs from the oracle"),
            ("raises", "ValueError: tiles do not fit"),
            ("aborts", "it ended its process by SIGABRT"),
            ("hangs", "no result after 25 s"),
        ],
    )
    def test_a_failure_is_named(self, hard: records.Results, name: str, reason: str) -> None:
        case = hard.cases["kernels", f"smoke/triton/{name}"]
        assert case.status == "failed"
        assert reason in case.reason

    def test_the_other_cases_are_measured(self, hard: records.Results) -> None:
        assert list(hard.ok("kernels")) == ["smoke/triton/good"]


def test_a_part_that_cannot_start_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    settings = Settings(
        "kernels", path, time.time() + 100, platform="cpu", smoke=True, cases_from="tests.no_such_module"
    )
    run_part(settings, settings.deadline, lambda: None)
    (case,) = records.read(path).of("kernels")
    assert case.status == "failed"
    assert "exit code 1" in case.reason


class TestTune:
    @pytest.mark.timeout(600)
    def test_dry_run_changes_no_table(self, tmp_path: Path) -> None:
        path = tmp_path / "tables" / "smoke" / "tuning.json"
        path.parent.mkdir(parents=True)
        options = ("--cases", "*doubled", "--tables", str(tmp_path / "tables"), "--minutes", "8", "--dry-run")
        process = run("tune.py", tmp_path / "out", *options)
        assert process.returncode == 0, process.stdout + process.stderr
        assert not path.exists()
        assert "smoke w32" in process.stdout
        measured = records.read(tmp_path / "out" / "tuning-records.jsonl").ok("tuning")
        assert [values["choice"] for values in measured.values()] == [
            None,
            *({"rows": rows, "num_warps": 4} for rows in (4, 8, 2)),
        ]
