"""The load generator against our own server, around an engine without a model."""

import json
from dataclasses import replace

import pytest

from jaxinfer.runner.simulated import CostModel
from jaxinfer.tokenization.chat import ChatTemplate
from serve.bench.datasets import Lengths
from serve.bench.options import ArrivalOptions, DatasetOptions, ReportOptions, ServeOptions
from serve.bench.serving import run_serving
from tests.support import engines
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("benchmarks", "http", "prefix cache")


@pytest.fixture(scope="module")
def server():
    settings = engines.config(num_blocks=512, max_num_seqs=4)
    engine = engines.simulated(settings, CostModel(), tokenizer=ByteTokenizer(), max_model_len=256)
    template = ChatTemplate({"default": "{% for m in messages %}{{ m['content'] }}{% endfor %}"})
    with running_server(replace(engine, chat_template=template)) as running:
        yield running


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_shared_prefixes_are_found_and_reported(server, endpoint, tmp_path):
    """Prompts of 40 common and 8 own tokens. All but the first few requests find the 40; usage and the server's
    counters say the same. Ids become text for chat, where a byte that is no character takes up to three tokens."""
    shared = DatasetOptions(
        name="shared-prefix", count=12, prefix_len=40, lengths=Lengths(8, 6), seed=len(endpoint)
    )
    options = ServeOptions(
        url=server.url,
        endpoint=endpoint,
        ignore_eos=True,
        warmups=0,
        dataset=shared,
        arrivals=ArrivalOptions(max_concurrency=2),
        report=ReportOptions(output=tmp_path / "r.json", detailed=True),
    )
    result = run_serving(options)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert json.loads((tmp_path / "r.json").read_text())["output_lens"] == [6] * 12
    assert result["total_output_tokens"] == 72
    assert result["preemptions"] == 0
    assert result["max_concurrent_requests"] == 2
    assert result["cached_prompt_tokens"] >= 9 * 40
    if endpoint == "completions":
        assert result["total_input_tokens"] == 12 * 48
    expected = result["cached_prompt_tokens"] / result["total_input_tokens"]
    assert result["prefix_cache_hit_rate"] == pytest.approx(expected, rel=0.02)
