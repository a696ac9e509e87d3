"""The parts of the benchmark: arrivals, loads, the client, the arithmetic of reports."""

import asyncio
import json
import math
from contextlib import suppress

import numpy as np
import pytest

from serve.bench.arrivals import RampUp, arrival_times
from serve.bench.datasets import (
    DatasetError,
    Lengths,
    as_text,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
    trace_requests,
)
from serve.bench.records import RequestRecord, StreamReader
from serve.bench.report import Limit, concurrency, details, statistics, summarize
from serve.bench.scrape import difference, parse
from serve.bench.stream_client import StreamClient, StreamError, event_data
from serve.bench.tokens import LocalTokens
from tests.support.tokenizers import ByteTokenizer

TOKENS = LocalTokens(ByteTokenizer())


# Arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variance_of_the_gamma_distribution(burstiness):
    """20,000 gaps: the mean within 4 standard errors, and the coefficient of variation within 5 %. For shape 1 the gaps
    are exponential: half of them lie below ln 2 / rate."""
    gaps = np.diff(arrival_times(20_001, rate=8.0, burstiness=burstiness, seed=1))
    deviation = burstiness**-0.5
    assert abs(gaps.mean() * 8 - 1) < 4 * deviation / math.sqrt(20_000)
    assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.05)
    if burstiness == 1.0:
        assert (gaps < math.log(2) / 8).mean() == pytest.approx(0.5, abs=0.015)


def test_infinite_burstiness_is_constant_and_an_infinite_rate_all_at_once():
    np.testing.assert_allclose(arrival_times(5, 10.0, math.inf), [0, 0.1, 0.2, 0.3, 0.4])
    assert arrival_times(3, math.inf).tolist() == [0, 0, 0]


def test_arrivals_depend_on_the_seed_only():
    assert (arrival_times(9, 2.0, seed=3) == arrival_times(9, 2.0, seed=3)).all()
    assert (arrival_times(9, 2.0, seed=3)[1:] != arrival_times(9, 2.0, seed=4)[1:]).all()


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.05), ("exponential", 1.0)])
def test_a_ramp_moves_the_rate_from_start_to_end(strategy, middle):
    times = arrival_times(101, math.inf, math.inf, ramp=RampUp(strategy, 0.1, 10.0))
    rates = 1 / np.diff(times)
    assert rates[0] == pytest.approx(0.1, rel=1.0)
    assert rates[49] == pytest.approx(middle, rel=0.05)
    assert rates[-1] == pytest.approx(10.0)


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"rate": 1.0, "burstiness": 0.0}, {"rate": -1.0}])
def test_rates_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="positive"):
        arrival_times(3, **bad)


# Loads


def test_random_requests_have_their_lengths_and_share_nothing():
    requests = random_requests(200, Lengths(20, 10, 0.5), TOKENS, seed=0)
    assert {len(r.prompt) for r in requests} == set(range(10, 31))
    assert {r.output_len for r in requests} == set(range(5, 16))
    assert all(token in TOKENS.ids for r in requests for token in r.prompt)
    assert len({tuple(r.prompt[:4]) for r in requests}) == 200
    assert requests == random_requests(200, Lengths(20, 10, 0.5), TOKENS, seed=0)
    fixed = random_requests(3, Lengths(7, 2), TOKENS, seed=0)
    assert [(r.prompt_len, r.output_len) for r in fixed] == [(7, 2)] * 3


def test_shared_prefixes_take_turns():
    requests = shared_prefix_requests(6, 2, 12, Lengths(3, 1), TOKENS, seed=5)
    heads = [tuple(r.prompt[:12]) for r in requests]
    assert heads == [heads[0], heads[1]] * 3
    assert heads[0] != heads[1]
    assert [r.prompt_len for r in requests] == [len(r.prompt) for r in requests] == [15] * 6


def test_sharegpt_files_give_first_questions_and_the_lengths_of_answers(tmp_path):
    path = tmp_path / "chats.json"
    turns = [
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "hi"},
        {"from": "human", "value": "?"},
    ]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"id": 3}, 5]))
    (request,) = sharegpt_requests(path, 10, TOKENS, seed=0)
    assert (request.prompt, request.prompt_len, request.output_len) == ("hello", 5, 2)
    (request,) = sharegpt_requests(path, 10, TOKENS, seed=0, output_len=9)
    assert request.output_len == 9


def test_traces_keep_their_times_lengths_and_shared_blocks(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 10, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 9, "output_length": 4, "hash_ids": [1, 3]},
        {"timestamp": 1500, "prompt": "plain", "output_length": 1},
        {"timestamp": 4000, "prompt": [5, 6], "output_length": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third, fourth = trace_requests(path, None, TOKENS, 0, speed=1000, block_size=4)
    assert [r.at for r in (first, second, third, fourth)] == [0, 0.5, 0.5, 3]
    assert (len(first.prompt), len(second.prompt)) == (10, 9)
    assert first.prompt[:4] == second.prompt[:4]
    assert first.prompt[4:] != second.prompt[4:]
    assert (third.prompt, third.prompt_len) == ("plain", 5)
    assert (fourth.prompt, fourth.prompt_len, fourth.output_len) == ([5, 6], 2, 1)
    assert len(trace_requests(path, 2, TOKENS, 0)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "request 2: not JSON"),
        ("[1]", "request 2: expected an object"),
        ('{"timestamp": 2}', "request 2: needs a number 'timestamp'"),
        ('{"timestamp": 2, "output_length": 0}', "positive integer 'output_length'"),
        ('{"timestamp": 2, "output_length": 1}', "request 2: needs 'prompt'"),
        ('{"timestamp": 2, "output_length": 1, "prompt": ["a"]}', "list of token ids"),
        ('{"timestamp": 0, "output_length": 1, "prompt": "a"}', "timestamps must not fall"),
    ],
)
def test_bad_traces_are_refused_with_the_line(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "output_length": 1, "prompt": "a"}\n' + line)
    with pytest.raises(DatasetError, match=message):
        trace_requests(path, None, TOKENS, 0)


def test_files_that_are_missing_or_of_another_kind_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="cannot read"):
        trace_requests(tmp_path / "none", None, TOKENS, 0)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DatasetError, match="JSON list"):
        sharegpt_requests(tmp_path / "a.json", 1, TOKENS, 0)
    (tmp_path / "empty").write_text("")
    with pytest.raises(DatasetError, match="no requests"):
        trace_requests(tmp_path / "empty", None, TOKENS, 0)
    with pytest.raises(DatasetError, match="at least one token"):
        Lengths(0, 1)


def test_prompts_become_text_for_endpoints_without_ids():
    (request,) = as_text(random_requests(1, Lengths(6, 1), TOKENS, 0), TOKENS)
    assert isinstance(request.prompt, str)
    assert request.prompt_len == 6


# Client

PIECES = [
    b'data: {"a":1}',
    b"\n\n",
    b": comment\n\nda",
    b"ta: one\ndata:two\n",
    b"\n",
    b"data: [DONE]\r\n\r",
    b"\n",
]
"""Events that do not end where the chunks of the transfer do."""
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
STREAM = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*PIECES, b""])
EVENTS = [b'{"a":1}', b"one\ntwo", b"[DONE]"]


async def _serve(answers: list[list[bytes]], close_after: bool = False) -> tuple[asyncio.Server, str]:
    """A server that answers the i-th request with pieces of bytes, each written on its own."""
    queue = iter(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            for piece in next(queue):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close_after:
                return

    async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(until_closed, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _post(answers: list[list[bytes]], count: int = 1, **options) -> list:
    """Answers, or errors, of requests one after the other, each with its events."""

    async def run() -> list:
        server, url = await _serve(answers, options.pop("close_after", False))
        client = StreamClient(url, **options)
        results = []
        for _ in range(count):
            events: list[bytes] = []
            try:
                answer = await client.post(
                    "/v1/completions", b"{}", lambda data, now, to=events: to.append(data)
                )
                results.append((answer, events))
            except StreamError as error:
                results.append((error, events))
        client.close()
        server.close()
        return results

    return asyncio.run(run())


def test_events_are_the_same_for_every_cutting_of_the_bytes():
    answers = [
        [STREAM[i : i + size] for i in range(0, len(STREAM), size)] for size in (1, 2, 3, 5, 7, 11, 50, 999)
    ]
    answers += [[STREAM[:cut], STREAM[cut:]] for cut in range(1, len(STREAM))]
    for answer, events in _post(answers, len(answers)):
        assert answer.status == 200
        assert events == EVENTS


def test_data_lines_are_joined_and_other_fields_ignored():
    assert event_data(b"data: x") == b"x"
    assert event_data(b"event: t\ndata:x\nid: 3\ndata:  y") == b"x\n y"
    assert event_data(b": only a comment") == b""


def test_connections_are_used_again_and_replaced_when_the_server_closed_them():
    ((first, _), (second, events)) = _post([[STREAM], [STREAM]], 2, close_after=True)
    assert first.status == second.status == 200
    assert events == EVENTS


def test_errors_carry_status_and_body():
    ((answer, events),) = _post([[b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nwait"]])
    assert (answer.status, answer.body, events) == (429, b"wait", [])


def test_broken_answers_are_errors():
    ((error, events),) = _post([[STREAM[:-20]]], close_after=True)
    assert "before the end of the answer" in str(error)
    assert events == EVENTS[:2]
    ((error, _),) = _post([[b"nonsense\r\n\r\n"]])
    assert "cannot be read" in str(error)
    ((error, _),) = _post([[STREAM[:100]]], timeout=0.2)
    assert "within 0.2 s" in str(error)


def test_addresses_need_a_scheme():
    with pytest.raises(ValueError, match="http://127"):
        StreamClient("localhost:80")


# Records and reports


def _record(sent: float, times: list[float], tokens: int | None = None, **fields) -> RequestRecord:
    ended = times[-1] if times else sent
    return RequestRecord(
        sent, sent=sent, times=times, ended=ended, output_tokens=tokens, finish_reason="stop", **fields
    )


def _feed(*chunks: dict, chat: bool = False) -> RequestRecord:
    record = RequestRecord(0.0)
    reader = StreamReader(record, 10.0, keep_text=True)
    for i, chunk in enumerate(chunks):
        reader.on_event(json.dumps(chunk).encode(), 11.0 + i)
    reader.on_event(b"[DONE]", 99.0)
    return record


def test_only_chunks_with_output_are_timed():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    think = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}
    text = {"choices": [{"delta": {"content": "x"}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
    record = _feed(role, think, call, text, end, usage)
    assert record.times == [2.0, 3.0, 4.0]
    assert record.ended == 5.0
    assert (record.text, record.num_output_tokens, record.num_prompt_tokens) == ("hmx", 5, 3)


def test_a_completion_chunk_without_text_is_a_token_unless_it_ends_the_stream():
    """The first half of a two-byte character has no text yet."""
    half, whole = {"choices": [{"text": ""}]}, {"choices": [{"text": "é"}]}
    end = {"choices": [{"text": "", "finish_reason": "length"}]}
    assert _feed(half, whole, end).times == [1.0, 2.0]
    assert _feed(half, whole, end).num_output_tokens == 2
    assert _feed(end).times == [1.0], "a text that ends at once has a first token, too"


def test_chunks_that_cannot_be_read_and_error_events_fail_the_request():
    assert "oh no" in (_feed({"error": {"message": "oh no"}}).error or "")
    record = RequestRecord(0.0)
    StreamReader(record, 0.0, False).on_event(b"{", 1.0)
    assert "cannot be read" in (record.error or "")
    assert not record.ok


def test_the_arithmetic_of_a_summary():
    records = [
        _record(0.0, [0.5, 1.0, 2.0], 5, prompt_tokens=10, cached_tokens=4),
        _record(1.0, [1.2], 1, prompt_tokens=20),
        RequestRecord(2.0, sent=2.0, error="HTTP 500"),
    ]
    summary = summarize(records, [Limit("ttft", 300.0)])
    assert (summary.completed, summary.failed, summary.duration) == (2, 1, 2.0)
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (30, 6, 4)
    assert summary.goodput == 0.5
    assert summary.samples["ttft"].tolist() == pytest.approx([500, 200])
    assert summary.samples["tpot"].tolist() == pytest.approx([1500 / 4])
    assert summary.samples["itl"].tolist() == pytest.approx([500, 1000])
    assert summary.samples["e2el"].tolist() == pytest.approx([2000, 200])
    assert summary.max_concurrent == 2
    assert summary.tokens_per_second.tolist() == pytest.approx([5 / 3, 5 / 3 + 1, 5 / 3])
    assert summary.errors == {"HTTP 500": 1}
    numbers = statistics(summary, ["ttft"], [50, 99])
    assert numbers["mean_ttft_ms"] == pytest.approx(350)
    assert numbers["std_ttft_ms"] == pytest.approx(150)
    assert numbers["p50_ttft_ms"] == numbers["median_ttft_ms"] == pytest.approx(350)
    assert numbers["p99_ttft_ms"] == pytest.approx(497)
    assert details(records)["errors"] == ["", "", "HTTP 500"]


def test_a_load_without_success_has_numbers_too():
    summary = summarize([RequestRecord(0.0, error="no")], [Limit("tpot", 1.0)])
    assert (summary.completed, summary.goodput, summary.duration) == (0, 0.0, 0.0)
    assert statistics(summary, ["itl"], [99])["p99_itl_ms"] == 0.0


def test_concurrency_counts_an_end_before_a_start_at_the_same_time():
    records = [_record(0.0, [1.0]), _record(1.0, [2.0]), _record(1.5, [1.8])]
    assert concurrency(records)[1].tolist() == [1, 0, 1, 2, 1, 0]


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-3", "itl:3", ":3", "tpot:x"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(ValueError, match="ttft:200"):
        Limit.parse(text)


def test_a_single_token_meets_every_limit_on_the_time_between_tokens():
    assert Limit.parse("tpot:0.001").met(_record(0.0, [5.0], 1))
    assert not Limit.parse("e2el:4999").met(_record(0.0, [5.0], 1))


# Counters


def test_samples_are_summed_over_labels_and_our_names_come_first():
    text = (
        "# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total 9\n# TYPE jaxinfer:num_preemptions counter\n"
        'jaxinfer:num_preemptions_total{engine="0"} 2\njaxinfer:num_preemptions_total{engine="1"} 3\n'
    )
    assert (parse(text) or {})["num_preemptions_total"] == 5
    assert parse("# TYPE other gauge\nother 1\n") is None
    assert parse("not { metrics") is None


def test_what_the_server_does_not_tell_is_none():
    assert difference(None, {"num_preemptions_total": 1}) == {
        "prefix_cache_hit_rate": None,
        "preemptions": None,
    }
    after = {"prefix_cache_queries_total": 8.0, "prefix_cache_hits_total": 6.0, "num_preemptions_total": 1.0}
    before = dict.fromkeys(after, 0.0)
    assert difference(before, after) == {"prefix_cache_hit_rate": 0.75, "preemptions": 1.0}
    assert difference(after, after)["prefix_cache_hit_rate"] is None, "no queries, no rate"
