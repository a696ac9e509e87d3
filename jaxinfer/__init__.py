"""jaxinfer: an LLM inference engine on JAX.

Names are imported when they are first used: a command that talks to a server needs no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig
    from jaxinfer.config_values import ConfigError
    from jaxinfer.engine.async_engine import AsyncEngine
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import CompletionOutput, RequestOutput
    from jaxinfer.request import QueueFullError, RequestError
    from jaxinfer.sampling_params import SamplingParams
    from jaxinfer.structured.spec import StructuredOutputs

_HOME = {
    "LLM": "llm",
    "AsyncEngine": "engine.async_engine",
    "CompletionOutput": "outputs",
    "ConfigError": "config_values",
    "EngineConfig": "config",
    "QueueFullError": "request",
    "RequestError": "request",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured.spec",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
