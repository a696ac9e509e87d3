"""LLM: offline generation and scoring."""

import itertools
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.config_hosts import need_one_process
from jaxinfer.config_values import ConfigError
from jaxinfer.engine.assembly import OutputAssembler
from jaxinfer.engine.build import Engine, build_engine
from jaxinfer.engine.inputs import Prompt
from jaxinfer.outputs import RequestOutput
from jaxinfer.progress import request_bar, startup_bar
from jaxinfer.request import Pooling, QueueFullError, RequestError, Sequence
from jaxinfer.sampling_params import SamplingParams

Messages = Seq[Mapping[str, Any]]


class LLM:
    """A model that generates text.

    Args:
        config: a YAML file, a model reference (directory, file, ``hf:org/name``, ``package:NAME/FILE``), or an
            ``EngineConfig``.
        overrides: configuration values by name, for example ``dtype="float32"`` or ``num_blocks=512``; a name that
            two scopes have means the first scope, ``cache={"dtype": ...}`` is explicit.

    Raises:
        ConfigError: the configuration is wrong.
        CheckpointError: the checkpoint is missing, incomplete or damaged.
    """

    def __init__(self, config: str | Path | EngineConfig, **overrides: Any) -> None:
        settings = EngineConfig.load(config, overrides)
        need_one_process(settings.hosts, "LLM")
        if settings.disaggregation.role != "none":
            raise ConfigError(
                f"disaggregation.role is {settings.disaggregation.role!r}, but LLM computes everything itself; "
                "use a server or AsyncEngine"
            )
        with startup_bar() as report:
            self.engine: Engine = build_engine(settings, report)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        priority: int | Seq[int] = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generates for every prompt; the results are in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is a string, ``{"prompt_token_ids": [...]}``, or, inside a list of
                prompts, a list of ids.
            params: one for all, or one per prompt.
            progress: show a progress bar on stderr when there are several prompts.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was generated then.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)  # type: ignore[arg-type]
        per_prompt = _per_prompt(params or SamplingParams(), len(batch), "params")
        priorities = _per_prompt(priority, len(batch), "priority")
        requests = [self._process(p, s, priority=r) for p, s, r in zip(batch, per_prompt, priorities)]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Messages | Seq[Messages],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each of several.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
            template_options: passed to the chat template (``add_generation_prompt``, ``tools``, ...).
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.engine.chat_template.render(m, **template_options) for m in conversations]  # type: ignore[arg-type]
        per_prompt = _per_prompt(params or SamplingParams(), len(prompts), "params")
        requests = [self._process(p, s, add_special_tokens=False) for p, s in zip(prompts, per_prompt)]
        return self._run(requests, progress)

    def score(self, prompts: Prompt | Seq[Prompt], *, progress: bool = True) -> list[float]:
        """Log-likelihood of each prompt: the sum of log p(token | tokens before it) over all tokens but the first."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
        totals = []
        for output in self.generate(prompts, params, progress=progress):
            entries = output.prompt_logprobs
            assert isinstance(entries, list)
            ids = output.prompt_token_ids
            totals.append(
                sum(entry[token].logprob for token, entry in zip(ids, entries) if entry is not None)
            )
        return totals

    def embed(
        self, prompts: Prompt | Seq[Prompt], *, pooling: Pooling = "mean", progress: bool = True
    ) -> list[np.ndarray]:
        """One vector per prompt, float32 [D]: hidden states after the final norm, pooled and not normalised.

        Args:
            pooling: "mean" over all tokens of the prompt, or its "last" token.
        """
        if pooling not in get_args(Pooling):
            raise RequestError(f"pooling is {pooling!r}; allowed: mean, last", "pooling")
        batch: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)  # type: ignore[arg-type]
        requests = [self._process(prompt, SamplingParams(), pooling=pooling) for prompt in batch]
        return [np.array(output.embedding, np.float32) for output in self._run(requests, progress)]

    def _process(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Sequence]:
        return self.engine.inputs.process(str(next(self._ids)), prompt, params, **options)

    def _run(self, requests: list[list[Sequence]], progress: bool) -> list[RequestOutput]:
        core, tokenizer = self.engine.core, self.engine.tokenizer
        assemblers = {s[0].request.request_id: OutputAssembler(s[0].request, tokenizer) for s in requests}
        results: dict[str, RequestOutput] = {}
        waiting = deque(requests)
        try:
            with request_bar(len(requests), progress and len(requests) > 1) as advance:
                while len(results) < len(requests):
                    self._feed(waiting)
                    for delta in core.step():
                        assembler = assemblers.get(delta.request_id)
                        if assembler is None:
                            continue
                        assembler.add(delta)
                        if assembler.finished:
                            results[delta.request_id] = assembler.take()
                            advance()
        finally:
            if len(results) < len(requests):
                for request_id in assemblers:
                    core.abort(request_id)
                while core.has_work:
                    core.step()
        return [results[s[0].request.request_id] for s in requests]

    def _feed(self, waiting: deque[list[Sequence]]) -> None:
        """Queues as many requests as the admission limits allow; offline, the others simply come later."""
        try:
            while waiting:
                self.engine.core.add(waiting[0])
                waiting.popleft()
        except QueueFullError:
            return


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)
