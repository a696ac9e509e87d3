"""Calls of ``/v1/completions`` for tests."""

from typing import Any

from tests.support.servers import FoldedStream, Server, fold_completion, sse_events


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, **body: Any) -> FoldedStream:
    response = server.client.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return fold_completion(sse_events(response))


def same_both_ways(server: Server, **body: Any) -> dict[str, Any]:
    """The answer; asserts that a stream tells the same."""
    whole, folded = complete(server, **body), stream(server, **body)
    assert folded.done
    assert folded.error is None
    assert len(folded.choices) == len(whole["choices"])
    for choice in whole["choices"]:
        streamed = folded.choices[choice["index"]]
        assert streamed.text == choice["text"]
        assert streamed.finish_reason == choice["finish_reason"]
        assert streamed.stop_reason == choice["stop_reason"]
        assert streamed.logprobs == (choice["logprobs"] or {})
        assert streamed.token_ids == choice.get("token_ids", [])
    return whole
