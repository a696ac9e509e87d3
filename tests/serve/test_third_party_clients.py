"""Clients that nobody here wrote, run as they are against a real server; docs/compatibility.md has their versions.

They live in an environment of their own (``make compat``), found by ``JAXINFER_COMPAT_VENV`` or at ``.venv-compat``.
``JAXINFER_VLLM_PYTHON`` names the Python of an environment that has vLLM, for its benchmark. Nothing is downloaded.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.build import build_engine
from tests.support.servers import Server, running_server
from tests.support.text_models import save_text_model, text_model_config

ROOT = Path(__file__).parent.parent.parent
VENV = Path(os.environ.get("JAXINFER_COMPAT_VENV", ROOT / ".venv-compat"))
VLLM_PYTHON = os.environ.get("JAXINFER_VLLM_PYTHON")
TIMEOUT = 600.0
VLLM_MAIN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.feature("third-party clients", "http"),
]
needs_venv = pytest.mark.skipif(
    not (VENV / "bin" / "python").exists(), reason="no environment with the clients; run make compat"
)


@dataclass(frozen=True)
class Setup:
    """A server, the directory of its model, and the same model in this process."""

    server: Server
    model: Path
    llm: LLM


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    model = tmp_path_factory.mktemp("model")
    save_text_model(model)
    config = text_model_config(model, **{"server.served_model_names": ["tiny"], "server.vllm_metrics": True})
    with running_server(build_engine(config, lambda *progress: None)) as server:
        # Compile what the clients will need, so that their timeouts measure the server.
        body = {
            "model": "tiny",
            "prompt": [[70, 80, 90] * 20] * 4,
            "max_tokens": 8,
            "echo": True,
            "logprobs": 1,
        }
        assert server.client.post("/v1/completions", json=body, timeout=TIMEOUT).status_code == 200
        yield Setup(server, model, LLM(config))


def _run(command: list[str], home: Path) -> str:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(home / "hf"),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def _version(python: Path | str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@needs_venv
@pytest.mark.parametrize("package", ["lm_eval", "guidellm", "schemathesis"])
def test_the_documented_versions_are_those_that_run(package):
    table = (ROOT / "docs" / "compatibility.md").read_text()
    row = re.search(rf"^\| {package} \| ([^ |]+)", table, re.MULTILINE)
    assert row is not None, f"docs/compatibility.md has no row for {package}"
    assert row.group(1) == _version(VENV / "bin" / "python", package)


# lm-eval

CHOICES = [
    {
        "question": "the quick brown fox jumps over",
        "choices": ["the lazy dog", "it is", "a thing"],
        "answer": 0,
    },
    {"question": "it is the question that", "choices": ["the answer asks", "fox"], "answer": 0},
    {
        "question": "Question: what is this? Answer:",
        "choices": ["that is the thing", "lazy", "é 😀"],
        "answer": 1,
    },
]
CHOICE_TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
ROLLING_TASK = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
GENERATE_TASK = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["zzz"], max_gen_toks: 12, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""


def _lm_eval(setup: Setup, home: Path, backend: str) -> dict[str, list[dict]]:
    """Runs three tasks; samples by task."""
    tasks = home / "tasks"
    tasks.mkdir()
    data = tasks / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, CHOICES)))
    for name, text in (("c", CHOICE_TASK), ("r", ROLLING_TASK), ("g", GENERATE_TASK)):
        (tasks / f"{name}.yaml").write_text(text.format(data=data))
    arguments = {
        "model": "tiny",
        "base_url": f"{setup.server.url}/v1/completions",
        "tokenizer_backend": backend,
        "max_length": 512,
        "num_concurrent": 2,
    }
    if backend == "huggingface":
        arguments["tokenizer"] = str(setup.model)
    joined = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [str(VENV / "bin" / "lm_eval"), "run", "--model", "local-completions", "--model_args", joined]
    command += ["--tasks", "tiny_choice,tiny_rolling,tiny_generate", "--include_path", str(tasks)]
    command += ["--batch_size", "4", "--output_path", str(home / "out"), "--log_samples"]
    _run(command, home)
    samples = {}
    for task in ("tiny_choice", "tiny_rolling", "tiny_generate"):
        (path,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return samples


@needs_venv
@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_loglikelihoods_of_lm_eval_equal_those_of_the_engine(setup, tmp_path, backend):
    """The tokens of a continuation are those of the whole text behind the tokens of its context, as lm-eval counts.
    Both sides compute in float32; batches differ, so sums agree to 1e-3."""
    llm = setup.llm
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    samples = _lm_eval(setup, tmp_path, backend)

    def score(ids: list[int]) -> float:
        return llm.score({"prompt_token_ids": ids}, progress=False)[0]

    compared = 0
    for sample in samples["tiny_choice"]:
        for arguments, response in zip(sample["arguments"].values(), sample["resps"]):
            context, continuation = arguments["arg_0"], arguments["arg_1"]
            whole = tokenizer.encode(context + continuation, False)
            head = whole[: len(tokenizer.encode(context, False))]
            expected = score(whole) - score(head)
            assert float(response[0][0]) == pytest.approx(expected, abs=1e-3)
            compared += 1
    for sample in samples["tiny_rolling"]:
        (response,) = sample["resps"]
        ids = [tokenizer.bos_token_id, *tokenizer.encode(sample["doc"]["question"], False)]
        value = response[0][0] if isinstance(response[0], list) else response[0]
        assert float(value) == pytest.approx(score(ids), abs=1e-3)
        compared += 1
    params = SamplingParams(temperature=0, max_tokens=12, stop=["zzz", "</s>"])
    for sample in samples["tiny_generate"]:
        (output,) = llm.generate(sample["doc"]["question"], params, progress=False)
        assert sample["resps"][0][0] == output.outputs[0].text
        compared += 1
    assert compared == 8 + 3 + 3


# guidellm


@needs_venv
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_streams_and_reads_usage(setup, tmp_path, path):
    command = [str(VENV / "bin" / "guidellm"), "run"]
    command += ["--backend", f"kind=openai_http,target={setup.server.url},model=tiny,request_format={path}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={setup.model}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"]
    command += ["--output", f"kind=json,path={tmp_path / 'g.json'}", "--disable-console"]
    _run(command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "g.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": 6,
        "errored": 0,
        "incomplete": 0,
        "total": 6,
    }
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8
        prompt_tokens = request["input_metrics"]["text_tokens"]
        assert prompt_tokens == 20 if path == "/v1/completions" else prompt_tokens >= 20
        assert request["output"]


# vllm bench serve


@pytest.mark.skipif(VLLM_PYTHON is None, reason="JAXINFER_VLLM_PYTHON is not set")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve_measures_this_server(setup, tmp_path, backend):
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    command = [str(VLLM_PYTHON), "-c", VLLM_MAIN, "--backend", backend, "--base-url", setup.server.url]
    command += ["--endpoint", endpoint, "--model", "tiny", "--tokenizer", str(setup.model)]
    command += ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", "8"]
    command += ["--num-prompts", "6", "--ignore-eos", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "v.json"]
    _run(command, tmp_path)
    result = json.loads((tmp_path / "v.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["output_lens"] == [8] * 6
    assert result["total_input_tokens"] >= 6 * 19
    assert all(ttft > 0 for ttft in result["ttfts"])
