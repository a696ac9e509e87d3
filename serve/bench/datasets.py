"""Loads for benchmarks: what is asked, how much is generated, and for traces when.

A dataset is a list of ``BenchRequest``. Lengths come from the seed alone, so two runs ask the same questions.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard


class TokenSource(Protocol):
    """Where token ids and lengths come from.

    Attributes:
        ids: random prompts are drawn from these.
    """

    @property
    def ids(self) -> range: ...

    def text(self, ids: Sequence[int]) -> str: ...

    def count(self, text: str) -> int: ...


class DatasetError(ValueError):
    """A file of requests, or the parameters of a generated load, cannot be used; the message says where and why."""


@dataclass(frozen=True)
class BenchRequest:
    """One request of a load.

    Attributes:
        prompt: text, or token ids (only the completions endpoint takes those).
        prompt_len: tokens, as far as known before the server reports them.
        output_len: tokens to ask for.
        at: seconds after the start at which it arrives; None: the arrival process decides.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    at: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Tokens of random requests, uniform within ``length * (1 - ratio)`` and ``length * (1 + ratio)``."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 1:
            raise DatasetError(
                f"input and output need at least one token (given: {self.input_len}, {self.output_len})"
            )
        if not 0 <= self.range_ratio < 1:
            raise DatasetError(f"range ratio {self.range_ratio} is not within [0, 1)")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return _around(self.input_len, self.range_ratio, rng), _around(self.output_len, self.range_ratio, rng)


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))


def random_requests(count: int, lengths: Lengths, tokens: TokenSource, seed: int) -> list[BenchRequest]:
    """Prompts of random tokens that share nothing."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt_len, output_len = lengths.draw(rng)
        ids = _random_ids(prompt_len, tokens, rng)
        requests.append(BenchRequest(ids, prompt_len, output_len))
    return requests


def shared_prefix_requests(
    count: int, prefixes: int, prefix_len: int, lengths: Lengths, tokens: TokenSource, seed: int
) -> list[BenchRequest]:
    """Prompts that begin with one of ``prefixes`` common parts of ``prefix_len`` tokens, in turns, and go on with
    random tokens (``lengths.input_len`` counts those only)."""
    if prefixes < 1 or prefix_len < 1:
        raise DatasetError(
            f"shared prefixes need a number and a length of at least 1 (given: {prefixes}, {prefix_len})"
        )
    rng = random.Random(seed)
    heads = [_random_ids(prefix_len, tokens, rng) for _ in range(prefixes)]
    rest = random_requests(count, lengths, tokens, seed + 1)
    return [
        replace(
            request, prompt=heads[i % prefixes] + request.prompt, prompt_len=prefix_len + request.prompt_len
        )
        for i, request in enumerate(rest)
        if isinstance(request.prompt, list)
    ]


def sharegpt_requests(
    path: Path, count: int, tokens: TokenSource, seed: int, output_len: int | None = None
) -> list[BenchRequest]:
    """First question and answer of conversations in a ShareGPT file, in random order.

    The file holds a JSON list of ``{"conversations": [{"from": ..., "value": text}, ...]}``; conversations of fewer
    than two turns are skipped.

    Args:
        output_len: tokens to ask for; None: as many as the answer in the file has.

    Raises:
        DatasetError: no such file, another format, or no conversation that can be used.
    """
    entries = _read_json(path)
    if not isinstance(entries, list):
        raise DatasetError(f"{path}: expected a JSON list of conversations, got {type(entries).__name__}")
    random.Random(seed).shuffle(entries)
    requests: list[BenchRequest] = []
    for entry in entries:
        turns = entry.get("conversations") or [] if isinstance(entry, dict) else []
        texts = [turn.get("value", "") for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) < 2 or not all(texts):
            continue
        asked = output_len or tokens.count(texts[1])
        requests.append(BenchRequest(texts[0], tokens.count(texts[0]), asked))
        if len(requests) == count:
            break
    if not requests:
        raise DatasetError(f"{path}: no conversation with two turns")
    return requests


def trace_requests(
    path: Path, count: int | None, tokens: TokenSource, seed: int, speed: float = 1.0, block_size: int = 512
) -> list[BenchRequest]:
    """Requests of a trace: one JSON object per line, sorted by ``timestamp``.

    Fields of a line: ``timestamp`` (number: arrival, counted from the first line's; divided by ``speed``, so 1000
    reads milliseconds), ``output_length`` (tokens to ask for), and either ``prompt`` (text or token ids) or
    ``input_length`` (tokens). With ``input_length`` there may be ``hash_ids``: one number per ``block_size`` tokens of
    the prompt; equal numbers are equal tokens, so prefixes are shared as in the recorded traffic.

    Raises:
        DatasetError: names the line.
    """
    if speed <= 0:
        raise DatasetError(f"trace speed {speed} is not positive")
    lines = [line for line in _read_text(path).splitlines() if line.strip()][:count]
    requests = [
        _trace_line(f"{path}, request {i + 1}", line, tokens, seed + i, block_size)
        for i, line in enumerate(lines)
    ]
    if not requests:
        raise DatasetError(f"{path}: no requests")
    times = [request.at or 0.0 for request in requests]
    if times != sorted(times):
        raise DatasetError(f"{path}: timestamps must not fall")
    return [replace(request, at=(at - times[0]) / speed) for request, at in zip(requests, times)]


def _trace_line(where: str, line: str, tokens: TokenSource, seed: int, block_size: int) -> BenchRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise DatasetError(f"{where}: expected an object, got {type(entry).__name__}")
    at, output_len = entry.get("timestamp"), entry.get("output_length")
    if not _is_number(at) or not _is_count(output_len):
        raise DatasetError(f"{where}: needs a number 'timestamp' and a positive integer 'output_length'")
    prompt = entry.get("prompt")
    if prompt is None:
        if not _is_count(entry.get("input_length")):
            raise DatasetError(f"{where}: needs 'prompt', or a positive integer 'input_length'")
        prompt = _blocks(entry["input_length"], entry.get("hash_ids", []), tokens, seed, block_size)
    if isinstance(prompt, str):
        return BenchRequest(prompt, tokens.count(prompt), output_len, at)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int for i in prompt):
        raise DatasetError(f"{where}: 'prompt' must be a text or a list of token ids")
    return BenchRequest(prompt, len(prompt), output_len, at)


def _blocks(
    length: int, hash_ids: Iterable[Any], tokens: TokenSource, seed: int, block_size: int
) -> list[int]:
    """Ids of a prompt: a block per hash, filled up with ids of its own."""
    ids: list[int] = []
    for name in hash_ids:
        ids += _random_ids(block_size, tokens, random.Random(f"block {name}"))
    ids += _random_ids(max(0, length - len(ids)), tokens, random.Random(seed))
    return ids[:length]


def as_text(requests: list[BenchRequest], tokens: TokenSource) -> list[BenchRequest]:
    """The same requests with their prompts as text, for endpoints that take no ids."""
    return [
        request if isinstance(request.prompt, str) else replace(request, prompt=tokens.text(request.prompt))
        for request in requests
    ]


def _random_ids(count: int, tokens: TokenSource, rng: random.Random) -> list[int]:
    return [rng.randrange(tokens.ids.start, tokens.ids.stop) for _ in range(count)]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: not JSON: {error}") from None
