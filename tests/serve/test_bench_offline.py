"""``jaxinfer bench throughput`` and ``jaxinfer bench latency`` on a tiny model."""

import json

import pytest
from typer.testing import CliRunner

from serve.cli import app
from tests.models.tiny_checkpoints import save

pytestmark = pytest.mark.feature("benchmarks", "command line")

OVERRIDES = {
    "model.dtype": "float32",
    "model.tokenizer": "none",
    "model.max-model-len": "48",
    "cache.block-size": "4",
    "cache.num-blocks": "64",
    "scheduler.max-num-seqs": "4",
    "scheduler.max-num-batched-tokens": "8",
    "compile.warm-up": "lazy",
    "compile.cache-dir": "none",
}
ENGINE = [text for key, value in OVERRIDES.items() for text in (f"--{key}", value)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save("llama", folder)
    return str(folder)


def _bench(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["bench", *arguments, *ENGINE])
    assert done.exit_code == 0, done.output
    return done.output


def test_throughput_prints_and_writes_the_numbers_of_vllm_bench(model, tmp_path):
    output = tmp_path / "r.json"
    lengths = ["--num-prompts", "5", "--input-len", "8", "--output-len", "6"]
    text = _bench("throughput", "--config", model, *lengths, "--disable-detokenize", "--output", str(output))
    result = json.loads(output.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 14)
    assert result["total_output_tokens"] == 30
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(70 / result["elapsed_time"])
    assert result["failed"] == 0
    assert f"Throughput: {result['requests_per_second']:.2f} requests/s" in text


def test_throughput_with_several_choices_counts_all_of_them(model, tmp_path):
    output = tmp_path / "r.json"
    shape = ["--dataset", "shared-prefix", "--prefix-len", "8", "--num-prompts", "3", "--input-len", "4"]
    choices = ["--output-len", "5", "--n", "2", "--disable-detokenize"]
    _bench("throughput", "--config", model, *shape, *choices, "--output", str(output))
    result = json.loads(output.read_text())
    assert (result["total_prompt_tokens"], result["total_output_tokens"]) == (36, 30)


def test_latency_leaves_the_warm_up_out(model, tmp_path):
    output = tmp_path / "r.json"
    rounds = ["--num-iters-warmup", "1", "--num-iters", "3", "--batch-size", "2"]
    lengths = ["--input-len", "6", "--output-len", "4"]
    text = _bench(
        "latency", "--config", model, *rounds, *lengths, "--disable-detokenize", "--output-json", str(output)
    )
    result = json.loads(output.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert "Avg latency" in text


def test_loads_of_text_need_a_tokenizer(model, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "prompt": "a", "output_length": 1}')
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "throughput",
            "--config",
            model,
            "--dataset",
            "trace",
            "--dataset-path",
            str(path),
            *ENGINE,
        ],
    )
    assert "no tokenizer" in str(done.exception)
