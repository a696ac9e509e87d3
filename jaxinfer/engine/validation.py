"""Validation of a client's requests. Needs no device: front ends use it too."""

from collections.abc import Sequence as Seq

from jaxinfer.engine.client import EngineRequest
from jaxinfer.engine.inputs import InputProcessor
from jaxinfer.request import Sequence

LONG_PROMPT = 4096
"""Prompt tokens whose validation is worth a thread."""


def takes_long(requests: Seq[EngineRequest]) -> bool:
    """Whether ``prepare`` would keep an event loop from its work."""
    return sum(len(request.prompt_token_ids) for request in requests) > LONG_PROMPT or any(
        request.params.structured_outputs is not None or request.params.bad_words for request in requests
    )


def prepare(
    inputs: InputProcessor, requests: Seq[EngineRequest], keys: Seq[str], compile_grammars: bool = True
) -> list[Sequence]:
    """Validates requests, compiles their grammars and makes their sequences. May run on any thread.

    Args:
        keys: ids of the requests in the core.
        compile_grammars: False only validates.

    Raises:
        RequestError: says what is wrong with which parameter.
    """
    sequences: list[Sequence] = []
    for request, key in zip(requests, keys, strict=True):
        prompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": request.cache_salt}
        sequences += inputs.process(
            key,
            prompt,
            request.params,
            request.priority,
            compile_grammars=compile_grammars,
            pooling=request.pooling,
        )
    return sequences


def check(inputs: InputProcessor, requests: Seq[EngineRequest]) -> None:
    """Validates requests. Compiles no grammar, so one that cannot be compiled passes.

    Raises:
        RequestError: says what is wrong with which parameter.
    """
    prepare(inputs, requests, [request.request_id for request in requests], compile_grammars=False)
