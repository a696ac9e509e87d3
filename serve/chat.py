"""``jaxinfer chat``: a conversation in the terminal, streamed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console

from jaxinfer.config import EngineConfig
from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.request import RequestError
from jaxinfer.sampling_params import OutputKind, SamplingParams

HELP = "type a message; /clear starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


async def chat(config: EngineConfig, params: SamplingParams, system: str | None) -> None:
    """Talks until the input ends. Answers go to stdout, everything else to stderr."""
    stderr = Console(stderr=True)
    async with AsyncEngine.from_config(config) as engine:
        stderr.print(HELP, style="dim")
        messages = _start(system)
        while (line := await asyncio.to_thread(_read_line)) is not None:
            if line == "/quit":
                return
            if line == "/clear":
                messages = _start(system)
                continue
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": await _answer(engine, messages, params)})
            except RequestError as error:
                stderr.print(f"{error}; /clear starts over", style="red", highlight=False)
                messages.pop()


async def _answer(engine: AsyncEngine, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    parts = []
    async for text in _stream(engine, messages, params):
        parts.append(text)
        print(text, end="", flush=True)
    print()
    return "".join(parts)


async def _stream(
    engine: AsyncEngine, messages: list[dict[str, Any]], params: SamplingParams
) -> AsyncIterator[str]:
    prompt = engine.engine.chat_template.render(messages)
    try:
        async for output in engine.generate(prompt, params, add_special_tokens=False):
            for choice in output.outputs:
                yield choice.text
    except asyncio.CancelledError:
        # Ctrl-C: the answer ends here, the conversation goes on.
        task = asyncio.current_task()
        if task is None or task.uncancel() > 0:
            raise


def chat_params(temperature: float, top_p: float, seed: int | None, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, output_kind=OutputKind.DELTA
    )


def _start(system: str | None) -> list[dict[str, Any]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _read_line() -> str | None:
    """The next message that is not empty; None at the end of the input."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()
