"""AsyncEngine: asyncio streams of outputs from an engine in this process."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from jaxinfer.config import EngineConfig
from jaxinfer.config_hosts import need_one_process
from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.build import Engine, build_engine
from jaxinfer.engine.client import EngineDeadError, EngineRequest
from jaxinfer.engine.inputs import Prompt
from jaxinfer.engine.thread_client import ThreadClient
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import Request
from jaxinfer.sampling_params import SamplingParams

__all__ = ["AsyncEngine", "EngineDeadError"]


class AsyncEngine:
    """Serves concurrent requests. Use it as an async context manager, or call ``shutdown``.

    Args:
        engine: what ``build_engine`` returns.
    """

    def __init__(self, engine: Engine) -> None:
        self._client = ThreadClient(engine, bounded=False)

    @classmethod
    def from_config(cls, config: str | Path | EngineConfig, **overrides: Any) -> Self:
        """Loads a model and starts the loop; see ``LLM`` for the arguments.

        What the process holds by then is taken out of the garbage collector's sight: it lives as long as the
        engine, and a full collection that walks over it stops the loop for 0.2 s.
        """
        settings = EngineConfig.load(config, overrides)
        need_one_process(settings.hosts, "AsyncEngine")
        engine = build_engine(settings)
        gc.collect()
        gc.freeze()
        return cls(engine)

    @property
    def engine(self) -> Engine:
        return self._client.engine

    @property
    def client(self) -> ThreadClient:
        """The same engine, as front ends use it."""
        return self._client

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs until the request is finished. Leaving the iteration early aborts the request. What is not
        taken merges into the next output.

        Raises:
            RequestError: the request is not valid, or its id is in use.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine failed.
        """
        params = params or SamplingParams()
        request_id = request_id or uuid.uuid4().hex
        text, ids, salt = self.engine.inputs.read(prompt, add_special_tokens)
        request = EngineRequest(request_id, tuple(ids), params, priority, salt)
        asked = Request(request_id, text, request.prompt_token_ids, params, priority, salt)
        assembler = OutputAssembler(asked, self.engine.tokenizer)
        async with await self._client.submit([request]) as stream:
            async for deltas in stream:
                for delta in deltas:
                    assembler.add(delta)
                if assembler.due:
                    yield assembler.take()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish reason ``abort``. Unknown ids are ignored."""
        await self._client.abort(request_id)

    def shutdown(self) -> None:
        """Stops the loop; open streams end with ``EngineDeadError``."""
        self._client.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)
