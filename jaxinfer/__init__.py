"""jaxinfer: an LLM inference engine on JAX."""

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.async_engine import AsyncEngine
from jaxinfer.llm import LLM
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.request import QueueFullError, RequestError
from jaxinfer.sampling_params import SamplingParams

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
]
