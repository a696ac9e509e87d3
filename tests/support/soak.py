"""A random mix of good, bad and broken-off calls against a server, for soak tests."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

Json = dict[str, Any]

SCHEMA: Json = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
TOOL: Json = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
ENDS = {"stop", "length"}

EXTRAS: tuple[Json, ...] = (
    {},
    {},
    {"seed": -1},
    {"stop": ["zq"]},
    {"presence_penalty": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.1},
)
BAD_BODIES: tuple[tuple[str, Json | bytes], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[" * 5000),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": ["a", ""]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": [2**63]}),
    ("/v1/completions", {"prompt": "a" * 5000}),
    ("/v1/completions", {"prompt": "a", "n": 10**6}),
    ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/completions", {"prompt": "a", "model": "unknown"}),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}),
    ("/v1/nothing", {}),
)


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        statuses: HTTP answers by (kind of call, status).
        choices: choices of calls that were answered to the end, by finish reason.
        problems: what should not have happened.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def calls(self, kind: str) -> int:
        return sum(count for (name, _), count in self.statuses.items() if name == kind)

    @property
    def refused(self) -> int:
        """Calls that got a 429."""
        return sum(count for (_, status), count in self.statuses.items() if status == 429)

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.problems.append(what)


class Soak:
    """One client that makes one call after the other."""

    def __init__(self, url: str, rng: random.Random, tally: Tally) -> None:
        self._rng = rng
        self._tally = tally
        self._url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream_chat": (5, self._stream_chat),
            "stream_completion": (5, self._stream_completion),
            "completion": (4, self._completion),
            "abort_stream": (4, self._abort_stream),
            "abort_call": (2, self._abort_call),
            "abort_half_sent": (1, self._abort_half_sent),
            "bad": (5, self._bad),
            "tool_call": (2, self._tool_call),
            "grammar": (3, self._grammar),
            "score": (1, self._score),
            "look": (2, self._look),
        }

    async def run_until(self, deadline: float, first: int) -> None:
        """Makes calls until ``deadline``, on the clock of ``time.monotonic``; the first is of kind number ``first``."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        kind = names[first % len(names)]
        async with self._http:
            while time.monotonic() < deadline:
                try:
                    await self._kinds[kind][1]()
                except httpx.TransportError as error:
                    self._tally.problems.append(f"{kind}: {type(error).__name__}: {error}")
                kind = self._rng.choices(names, weights)[0]
                if self._rng.random() < 0.2:
                    await asyncio.sleep(self._rng.random() * 0.05)

    # ---- calls that are answered

    async def _stream_chat(self) -> None:
        messages = [{"role": "user", "content": self._text()}]
        body = {"messages": messages, "logprobs": True, "top_logprobs": 2, **self._sampling(), "stream": True}
        await self._read_stream("stream_chat", "/v1/chat/completions", body)

    async def _stream_completion(self) -> None:
        body = {"prompt": self._text(), "n": self._rng.choice([1, 1, 3]), **self._sampling(), "stream": True}
        await self._read_stream("stream_completion", "/v1/completions", body)

    async def _read_stream(self, kind: str, path: str, body: Json) -> None:
        body["stream_options"] = {"include_usage": True}
        reasons: dict[int, str] = {}
        last = None
        async with self._http.stream("POST", path, json=body) as response:
            if not await self._admitted(kind, response):
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line[6:]
                    chunk = {} if last == "[DONE]" else json.loads(last)
                    self._tally.expect("error" not in chunk, f"{kind}: {chunk}")
                    reasons |= {
                        c["index"]: c["finish_reason"] for c in chunk.get("choices", ()) if c["finish_reason"]
                    }
        self._tally.expect(last == "[DONE]", f"{kind}: ended with {last!r}")
        self._tally.expect(len(reasons) == body.get("n", 1), f"{kind}: finish reasons {reasons}")
        self._count(kind, list(reasons.values()))

    async def _completion(self) -> None:
        prompts = [self._text() for _ in range(self._rng.choice([1, 1, 3]))]
        answer = await self._post("completion", "/v1/completions", {"prompt": prompts, **self._sampling()})
        if answer is not None:
            self._tally.expect(len(answer["choices"]) == len(prompts), "completion: choices are missing")

    async def _tool_call(self) -> None:
        body = {
            "messages": [{"role": "user", "content": self._text()}],
            "tools": [TOOL],
            "tool_choice": "required",
        }
        answer = await self._post(
            "tool_call", "/v1/chat/completions", {**body, **self._sampling(), "max_tokens": 200}
        )
        if answer is not None and answer["choices"][0]["finish_reason"] == "tool_calls":
            for call in answer["choices"][0]["message"]["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)

    async def _grammar(self) -> None:
        kind, constraint = self._rng.choice(
            [
                ("json", {"structured_outputs": {"json": SCHEMA}}),
                ("choice", {"structured_outputs": {"choice": ["yes", "no"]}}),
                ("regex", {"structured_outputs": {"regex": "[a-c]{2,5}"}}),
            ]
        )
        body = {"prompt": self._text(), **self._sampling(), "max_tokens": 100, **constraint}
        answer = await self._post("grammar", "/v1/completions", body)
        if answer is None or answer["choices"][0]["finish_reason"] != "stop":
            return
        text = answer["choices"][0]["text"]
        if kind == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif kind == "choice":
            self._tally.expect(text in ("yes", "no"), f"grammar: choice gave {text!r}")
        else:
            self._tally.expect(
                2 <= len(text) <= 5 and set(text) <= set("abc"), f"grammar: regex gave {text!r}"
            )

    async def _score(self) -> None:
        body = {"prompt": self._text(), "max_tokens": 0, "echo": True, "logprobs": 1}
        await self._post("score", "/v1/completions", body)

    async def _post(self, kind: str, path: str, body: Json) -> Json | None:
        response = await self._http.post(path, json=body)
        if not await self._admitted(kind, response):
            return None
        answer: Json = response.json()
        self._count(kind, [choice["finish_reason"] for choice in answer["choices"]])
        return answer

    async def _admitted(self, kind: str, response: httpx.Response) -> bool:
        """Whether the call was served; the only other answer that is right is a refusal for a full queue."""
        self._tally.statuses[kind, response.status_code] += 1
        if response.status_code != 200:
            text = (await response.aread()).decode()
            full = response.status_code == 429 and "retry-after" in response.headers
            self._tally.expect(full, f"{kind}: {response.status_code} {text[:300]}")
        return response.status_code == 200

    def _count(self, kind: str, reasons: list[str]) -> None:
        self._tally.choices.update(reasons)
        self._tally.expect(set(reasons) <= ENDS | {"tool_calls"}, f"{kind}: finish reasons {reasons}")

    # ---- calls that are left

    async def _abort_stream(self) -> None:
        body = {"prompt": self._text(), "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if await self._admitted("abort_stream", response):
                chunks = self._rng.randrange(12)
                async for _ in response.aiter_lines():
                    chunks -= 1
                    if chunks <= 0:
                        break

    async def _abort_call(self) -> None:
        body = {"prompt": [self._text()] * 2, "max_tokens": 400, "ignore_eos": True}
        call = asyncio.ensure_future(self._http.post("/v1/completions", json=body))
        await asyncio.wait([call], timeout=self._rng.random() * 0.15)
        if call.done():
            await self._admitted("abort_call", call.result())
        else:
            self._tally.statuses["abort_call", 0] += 1
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _abort_half_sent(self) -> None:
        """A client that dies while it sends its body."""
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": "')
        await writer.drain()
        await asyncio.sleep(self._rng.random() * 0.02)
        writer.transport.abort()
        self._tally.statuses["abort_half_sent", 0] += 1

    # ---- others

    async def _bad(self) -> None:
        path, body = self._rng.choice(BAD_BODIES)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self._http.post(path, content=content, headers={"Content-Type": "application/json"})
        self._tally.statuses["bad", response.status_code] += 1
        right = response.status_code in (400, 404, 413) and "error" in response.json()
        self._tally.expect(
            right, f"bad: {path} {content[:80]!r}: {response.status_code} {response.text[:200]}"
        )

    async def _look(self) -> None:
        path = self._rng.choice(["/health", "/metrics", "/dashboard/data", "/v1/models", "/load"])
        response = await self._http.get(path)
        self._tally.statuses["look", response.status_code] += 1
        self._tally.expect(response.status_code == 200, f"look: {path} {response.status_code}")

    def _text(self) -> str:
        """Texts that often share a beginning."""
        start = self._rng.choice(["", "The same long beginning of many prompts. " * 3])
        return start + "".join(self._rng.choices("abcdefgh ijkl", k=self._rng.randrange(1, 60)))

    def _sampling(self) -> Json:
        body: Json = {
            "max_tokens": self._rng.randrange(1, 60),
            "temperature": self._rng.choice([0, 0.7, 1.0]),
        }
        extra: list[Json] = [
            {},
            {},
            {"seed": -1},
            {"stop": ["zq"]},
            {"presence_penalty": 0.5},
            {"top_p": 0.9},
            {"min_p": 0.1},
        ]
        return body | self._rng.choice(extra)


async def soak(url: str, seconds: float, num_clients: int, seed: int) -> Tally:
    """Runs clients side by side for so long. With at least 11 clients every kind of call occurs."""
    tally = Tally()
    deadline = time.monotonic() + seconds
    clients = [Soak(url, random.Random(seed + i), tally) for i in range(num_clients)]
    await asyncio.gather(*(client.run_until(deadline, i) for i, client in enumerate(clients)))
    return tally
