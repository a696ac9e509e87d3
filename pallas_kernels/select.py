"""Chooses the backend of every op once, at start-up."""

import logging
from dataclasses import replace

from pallas_kernels.grouped_matmul import reference as grouped_matmul_reference
from pallas_kernels.grouped_matmul import xla as grouped_matmul_xla
from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.linear import reference as linear_reference
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu as linear_xla_cpu
from pallas_kernels.ops import Ops
from pallas_kernels.ragged_paged_attention import reference as attention_reference
from pallas_kernels.ragged_paged_attention import xla as attention_xla

BACKENDS = ("auto", "xla", "reference")

logger = logging.getLogger(__name__)

_XLA = Ops(
    attention=attention_xla.ragged_paged_attention,
    kv_write=kv_write_xla.kv_write,
    linear=linear_xla.linear,
    grouped_matmul=grouped_matmul_xla.grouped_matmul,
)
_XLA_CPU = replace(_XLA, linear=linear_xla_cpu.linear)
_REFERENCE = Ops(
    attention=attention_reference.ragged_paged_attention,
    kv_write=kv_write_reference.kv_write,
    linear=linear_reference.linear,
    grouped_matmul=grouped_matmul_reference.grouped_matmul,
)


def select_ops(backend: str, platform: str, strict: bool) -> Ops:
    """The ops a model runs with.

    Args:
        backend: "xla", "reference", or "auto" for the fastest one that exists for the platform.
        platform: what ``jax.default_backend()`` says: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
        strict: a fallback to a backend that is not made for the platform is an error instead of a warning.

    Raises:
        ValueError: unknown backend.
        RuntimeError: a fallback under ``strict``.
    """
    if backend not in BACKENDS:
        raise ValueError(f"kernel backend {backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if backend == "reference":
        logger.info("kernels: reference (as asked)")
        return _REFERENCE
    if backend == "auto" and platform != "cpu":
        why = f"there is no kernel backend for platform {platform!r}"
        if strict:
            raise RuntimeError(f"kernels: {why}, and strict forbids the fallback to xla")
        logger.warning("kernels: xla, because %s", why)
        return _XLA
    logger.info("kernels: xla (%s, on %s)", "automatic choice" if backend == "auto" else "as asked", platform)
    return _XLA_CPU if platform == "cpu" else _XLA
