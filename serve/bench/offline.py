"""``jaxinfer bench throughput`` and ``jaxinfer bench latency``: the engine alone, without a server."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from serve.bench.datasets import DatasetError, Lengths, TokenSource, random_requests
from serve.bench.options import DatasetOptions
from serve.bench.tokens import LocalTokens, ordinary_ids

PERCENTILES = (10, 25, 50, 75, 90, 99)
OnRound = Callable[[int, float], None]


class _OnlyIds:
    """Ids of a model without a tokenizer."""

    def __init__(self, vocab_size: int) -> None:
        self.ids = ordinary_ids(vocab_size)

    def text(self, ids: object) -> str:
        raise DatasetError("the model has no tokenizer")

    def count(self, text: str) -> int:
        raise DatasetError("the model has no tokenizer; only random and shared-prefix loads work")


def throughput(llm: LLM, dataset: DatasetOptions, params: SamplingParams) -> dict[str, Any]:
    """All requests at once, as fast as they go.

    Args:
        params: of every request; the dataset decides ``max_tokens``.

    Returns:
        The result under the names of ``vllm bench throughput``, with output tokens apart.
    """
    requests = dataset.load(_source(llm), text_only=False)
    prompts = [r.prompt if isinstance(r.prompt, str) else {"prompt_token_ids": r.prompt} for r in requests]
    per_request = [replace(params, max_tokens=r.output_len) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, per_request)
    seconds = time.perf_counter() - start
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    total = prompt_tokens + output_tokens
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "failed": sum(output.error is not None for output in outputs),
        "total_num_tokens": total,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }


def latency(
    llm: LLM,
    lengths: Lengths,
    batch_size: int,
    warmups: int,
    iterations: int,
    params: SamplingParams,
    on_round: OnRound = lambda index, seconds: None,
) -> dict[str, Any]:
    """One batch after the other, every batch of other prompts, so that the prefix cache does not help.

    Args:
        params: of every request; EOS is ignored, so that every round does the same work.
        on_round: called after each round, warm-up included, with its number and seconds.

    Returns:
        The result under the names of ``vllm bench latency``; seconds.
    """
    if batch_size < 1 or iterations < 1:
        raise ValueError(f"batch size and iterations must be positive (given: {batch_size}, {iterations})")
    source = _source(llm)
    per_request = replace(params, max_tokens=lengths.output_len, ignore_eos=True)
    seconds: list[float] = []
    for index in range(warmups + iterations):
        requests = random_requests(batch_size, lengths, source, seed=index)
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        start = time.perf_counter()
        llm.generate(prompts, per_request, progress=False)
        seconds.append(time.perf_counter() - start)
        on_round(index, seconds[-1])
    measured = np.array(seconds[warmups:])
    return {
        "model_id": llm.engine.config.model.reference,
        "avg_latency": float(measured.mean()),
        "latencies": measured.tolist(),
        "percentiles": {str(p): float(np.percentile(measured, p)) for p in PERCENTILES},
    }


def _source(llm: LLM) -> TokenSource:
    tokenizer = llm.engine.tokenizer
    return _OnlyIds(llm.engine.limits.vocab_size) if tokenizer is None else LocalTokens(tokenizer)
