"""The command line."""

import json
import subprocess
import sys
from typing import Any

import pytest

from jaxinfer.config_values import ConfigError
from serve.cli import main, parse_overrides


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from serve.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def call(monkeypatch, capsys):
    """The command in this process, which has imported what takes a new one seconds: status and what it printed."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxinfer", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def test_overrides_are_scoped_keys_with_yaml_values():
    given = ["--cache.num-blocks", "512", "--model.dtype=float32", "--cache.prefix_caching", "false"]
    expected = {"cache.num_blocks": 512, "model.dtype": "float32", "cache.prefix_caching": False}
    assert parse_overrides(given) == expected


@pytest.mark.parametrize("bad", [["--foo", "1"], ["stray"], ["--cache.num-blocks"]])
def test_other_arguments_are_refused_with_an_example(bad):
    with pytest.raises(ConfigError, match=r"--cache\.num-blocks 512"):
        parse_overrides(bad)


def test_models_lists_the_registry(call):
    status, out, _ = call("models")
    assert status == 0
    assert "LlamaForCausalLM" in out


def test_errors_are_one_message_on_stderr_without_traceback(call):
    result = _run(
        "plan", "--config", "configs/smollm2-135m.yaml", "--cache.num-blok", "4", "--model.dtype", "int3"
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "did you mean num_blocks?" in result.stderr
    assert "model.dtype" in result.stderr
    status, out, err = call("generate", "--config", "no/such/dir", "--prompt", "x")
    assert (status, out) == (2, "")
    assert "no/such/dir" in err


@pytest.mark.feature("command line")
def test_generate_prints_text_on_stdout_and_json_on_request():
    common = ["generate", "--config", "configs/smollm2-135m.yaml", "--chat", "--temperature", "0"]
    question = ["--prompt", "What is the capital of France?", "--max-tokens", "16"]
    result = _run(*common, *question, "--json", "--logprobs", "1")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    choice = answer["outputs"][0]
    assert choice["text"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == 7
    first = choice["logprobs"][0][str(choice["token_ids"][0])]
    assert first["decoded_token"] == "The"
    assert first["rank"] == 1


@pytest.mark.slow
@pytest.mark.feature("Orbax", "command line")
def test_convert_writes_a_checkpoint_that_answers_the_same(tmp_path):
    target = str(tmp_path / "converted")
    assert _run("convert", "--config", "configs/smollm2-135m.yaml", "--output", target).returncode == 0
    options = ["--chat", "--temperature", "0", "--max-tokens", "16", "--model.max-model-len", "512"]
    options += ["--compile.warm-up", "lazy"]
    result = _run("generate", "--config", target, "--prompt", "What is the capital of France?", *options)
    assert result.stdout.strip() == "The capital of France is Paris.", result.stderr
    again = _run("convert", "--config", "configs/smollm2-135m.yaml", "--output", target)
    assert again.returncode == 2
    assert "not empty" in again.stderr
