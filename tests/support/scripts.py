"""Scripts that decide by the prompt what a model says: HTTP tests cannot choose the engine's request ids."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxinfer.request import Request
from jaxinfer.runner.scripted import Script
from tests.support.engines import EOS, VOCAB, one_hot


def say(outputs: Mapping[str, Sequence[int]] | Sequence[int], eos: int = EOS[0]) -> Script:
    """Forces output tokens, for all prompts or by the prompt's text (bytes are ids); behind them comes ``eos``."""

    def script(request: Request, index: int, position: int) -> np.ndarray:
        prompt = request.prompt_token_ids
        tokens = outputs
        if isinstance(outputs, Mapping):
            tokens = outputs[bytes(token for token in prompt if token < 256).decode()]
        at = position - len(prompt)
        return one_hot(tokens[at] if 0 <= at < len(tokens) else eos)

    return script


def endless(token: int = ord("x")) -> Script:
    """Says the same token for ever."""
    return lambda request, index, position: one_hot(token)


def slow(script: Script, seconds: float) -> Script:
    """Every row takes so long."""

    def slowed(request: Request, index: int, position: int) -> np.ndarray:
        time.sleep(seconds)
        return script(request, index, position)

    return slowed


def broken(script: Script, prompt: str, at: int, row: np.ndarray | None = None) -> Script:
    """The output token number ``at`` of one prompt has the logits ``row``, by default not a number."""
    bad = np.full(VOCAB, np.nan, np.float32) if row is None else row

    def breaking(request: Request, index: int, position: int) -> np.ndarray:
        ours = request.prompt_token_ids == tuple(prompt.encode())
        return bad if ours and position - len(prompt) == at else script(request, index, position)

    return breaking


def raising(script: Script, prompt: str, at: int, failed: list[float]) -> Script:
    """The whole model fails at the output token number ``at`` of one prompt; the time is noted in ``failed``."""

    def failing(request: Request, index: int, position: int) -> np.ndarray:
        if request.prompt_token_ids == tuple(prompt.encode()) and position - len(prompt) == at:
            failed.append(time.monotonic())
            raise RuntimeError("the device is gone")
        return script(request, index, position)

    return failing
