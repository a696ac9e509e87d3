"""In which dtype a processor should compute."""

import logging
from pathlib import Path

import jax.numpy as jnp

logger = logging.getLogger(__name__)

_NATIVE_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Processor flags (x86, arm64) that mean matrix products in bfloat16."""


def compute_dtype(dtype: jnp.dtype, platform: str, cpu_flags: frozenset[str] | None = None) -> jnp.dtype:
    """The dtype for weights and activations, given the one that the model asks for.

    A CPU without 16-bit products converts weights and caches at every step: on Zen 3 the head of a 135M model takes
    73 ms instead of 7 for one row. There 16-bit models are computed in float32, which represents their weights
    exactly, for twice the memory.

    Args:
        platform: what ``jax.default_backend()`` says.
        cpu_flags: of the processor; read from the system if absent.
    """
    if platform != "cpu" or jnp.dtype(dtype).itemsize != 2:
        return jnp.dtype(dtype)
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    if dtype == jnp.bfloat16 and flags.intersection(_NATIVE_FLAGS):
        return jnp.dtype(dtype)
    name = jnp.dtype(dtype).name
    logger.info("dtype: %s is computed in float32, because this processor has no %s products", name, name)
    return jnp.dtype(jnp.float32)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(words, ()))
