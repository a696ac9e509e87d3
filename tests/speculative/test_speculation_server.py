"""What a client and a dashboard see of speculation."""

import pytest

from jaxinfer.config_speculative import SpeculativeConfig
from tests.support import engines
from tests.support.servers import running_server
from tests.support.tokenizers import ByteTokenizer

pytestmark = pytest.mark.feature("n-gram speculation", "http", "completions")

NGRAM = SpeculativeConfig(drafter="ngram", max_drafts=4, max_step_drafts=8)
BODY = {"model": "test", "prompt": "ABCABC", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.mark.feature("metrics", "vLLM names")
def test_metrics_count_drafts_and_answers_tell_their_share():
    script = engines.static_script({65: 5.0})
    engine = engines.scripted(script, engines.config(speculative=NGRAM), tokenizer=ByteTokenizer())
    with running_server(engine, vllm_metrics=True) as server:
        answer = server.client.post("/v1/completions", json={**BODY, "return_metrics": True}).json()
        lines = dict(
            line.rsplit(" ", 1)
            for line in server.client.get("/metrics").text.splitlines()
            if line.startswith("vllm:spec_decode")
        )
    assert answer["choices"][0]["text"] == "A" * 20
    stats = engine.core.stats
    assert answer["metrics"]["num_draft_tokens"] == stats.drafted_tokens > 0
    assert answer["metrics"]["num_accepted_tokens"] == stats.accepted_tokens > 0
    labels = 'engine="0",model_name="test"'
    assert float(lines[f"vllm:spec_decode_num_drafts_total{{{labels}}}"]) == stats.drafts
    assert float(lines[f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}"]) == stats.drafted_tokens
    assert float(lines[f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}"]) == stats.accepted_tokens
    by_position = [
        float(value)
        for name, value in lines.items()
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")
    ]
    assert sum(by_position) == stats.accepted_tokens
    assert by_position == sorted(by_position, reverse=True)


@pytest.mark.feature("streaming")
def test_a_stream_holds_the_same_text_in_fewer_pieces():
    def events(speculative: SpeculativeConfig) -> list[str]:
        config = engines.config(speculative=speculative)
        engine = engines.scripted(engines.static_script({65: 5.0}), config, tokenizer=ByteTokenizer())
        with (
            running_server(engine) as server,
            server.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
        ):
            return [line for line in response.iter_lines() if line.startswith("data: {")]

    fast, plain = events(NGRAM), events(SpeculativeConfig())
    assert len(fast) <= len(plain)
    assert sum(event.count("A") for event in fast) == sum(event.count("A") for event in plain)
