"""``jaxinfer plan --load``: tables, JSON, the plot, and what is told when it cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxinfer.planning.described import known_models
from serve.cli import app

LOAD = "rate=1000, prompt=1500, output=300, ttft=1s, tpot=50ms"
LLAMA = ("--model", "llama-3-8b", "--gpu", "h200", "--load", LOAD, "--layout", "tensor=1")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


@pytest.mark.feature("capacity planner")
def test_tables_say_what_was_found_and_what_was_assumed() -> None:
    text = run(*LLAMA, "--compare", "--use", "weights=fp8, prefix_hits=0.5")
    for part in (
        "GPUs for 1,000 requests/s",
        "KV cache",
        "128.0 KiB a token",
        "exchange",
        "with and without",
    ):
        assert part in text
    assert "all but fp8 weights" in text
    assert "FlashMLA" in text  # a source


def test_json_has_the_numbers() -> None:
    found = answer(*LLAMA, "--assume", "memory_efficiency=0.9")
    assert found["assumptions"]["memory_efficiency"]["value"] == 0.9
    (pool,) = found["pools"]
    assert found["devices"] == pool["replicas"] * pool["tensor"]
    assert pool["service"]["tpot"] <= 0.05
    memory = pool["memory"]
    whole = memory["weights"] + memory["temporaries"] + memory["cache"] + memory["margin"]
    assert whole == pytest.approx(140 * 2**30)
    assert found["load"]["gap"] is None
    pools = answer(*LLAMA, "--use", "disaggregated=yes")["pools"]
    assert [pool["purpose"] for pool in pools] == ["prefill", "decode"]


def test_any_directory_with_a_configuration_can_be_planned_for(tmp_path: Path) -> None:
    """Weights are not needed; fp8 blocks are seen."""
    (tmp_path / "config.json").write_text(json.dumps(known_models()["qwen3-30b-a3b"]["config"]))
    found = answer(
        "--model", str(tmp_path), "--gpu", "h100", "--load", LOAD, "--layout", "tensor=2, expert=2"
    )
    assert found["parameters"] == 30_532_122_624
    assert found["pools"][0]["expert"] == 2


@pytest.mark.slow
def test_the_sweep_is_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(*LLAMA[:-2], "--sweep", str(tmp_path / "sweep.png"))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h200"), "belong to --load; give --load"),
        (("--load", LOAD, "--gpu", "h200"), "--load needs --model and --gpu"),
        ((*LLAMA, "--cache.num-blocks", "4"), "--load needs --model and --gpu, not --cache.num-blocks 4"),
        (
            ("--model", "llama-3-8b", "--gpu", "tpu", "--load", LOAD),
            "unknown GPU 'tpu'; allowed: a100, l4, h100",
        ),
        (("--model", "nothing", "--gpu", "h200", "--load", LOAD), "Known without a file: llama-3-8b"),
        ((*LLAMA[:-1], "tensor=1.5"), "layout: tensor=1.5 is not allowed"),
        ((*LLAMA[:-1], "tensor=2", "--attention-by-data"), "only expert may be more than 1"),
        ((*LLAMA[:-1], "tensor=3"), "8 kv_heads cannot be spread over 3 devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ",
)
def test_what_is_wrong_is_told(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
