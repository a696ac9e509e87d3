"""Chooses the backend of every op once, at start-up."""

import logging
from dataclasses import replace

from pallas_kernels.gpus import Generation
from pallas_kernels.grouped_matmul import reference as grouped_matmul_reference
from pallas_kernels.grouped_matmul import triton as grouped_matmul_triton
from pallas_kernels.grouped_matmul import xla as grouped_matmul_xla
from pallas_kernels.grouped_matmul import xla_gpu as grouped_matmul_xla_gpu
from pallas_kernels.linear import reference as linear_reference
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu as linear_xla_cpu
from pallas_kernels.ops import Ops
from pallas_kernels.preferred import Preferred
from pallas_kernels.ragged_paged_attention import mosaic as attention_mosaic
from pallas_kernels.ragged_paged_attention import reference as attention_reference
from pallas_kernels.ragged_paged_attention import triton as attention_triton
from pallas_kernels.ragged_paged_attention import xla as attention_xla
from pallas_kernels.rope_kv_write import reference as rope_kv_write_reference
from pallas_kernels.rope_kv_write import triton as rope_kv_write_triton
from pallas_kernels.rope_kv_write import xla as rope_kv_write_xla
from pallas_kernels.sampling import triton as sampling_triton
from pallas_kernels.sampling import xla as sampling_xla

BACKENDS = ("auto", "xla", "triton", "mosaic", "reference")
INTERPRETED: Generation = "hopper"
"""What kernels are compiled for where no GPU is: in the interpreter it decides tuning choices only."""

logger = logging.getLogger(__name__)

_XLA_GPU = Ops(
    attention=attention_xla.ragged_paged_attention,
    rope_kv_write=rope_kv_write_xla.rope_kv_write,
    linear=linear_xla.linear,
    grouped_matmul=grouped_matmul_xla_gpu.grouped_matmul,
    truncated_draw=None,
    platform="gpu",
)
_XLA_CPU = replace(
    _XLA_GPU, linear=linear_xla_cpu.linear, grouped_matmul=grouped_matmul_xla.grouped_matmul, platform="cpu"
)
_REFERENCE = Ops(
    attention=attention_reference.ragged_paged_attention,
    rope_kv_write=rope_kv_write_reference.rope_kv_write,
    linear=linear_reference.linear,
    grouped_matmul=grouped_matmul_reference.grouped_matmul,
    truncated_draw=None,
    platform="cpu",
)


def select_ops(backend: str, platform: str, strict: bool, generation: Generation | None = None) -> Ops:
    """The ops a model runs with.

    Args:
        backend: "xla", "triton", "reference", or "auto" for the fastest one that exists for the platform: "triton" on
            GPUs. "mosaic" is "triton" with Hopper's own attention of prefill chunks, which becomes the automatic choice
            once it is measured to be faster. Without a GPU Triton kernels run in Pallas's interpreter, for tests.
        platform: what ``jax.default_backend()`` says: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
        strict: a fallback to XLA is an error instead of a warning, at start-up or when an op is first called with
            arguments that its kernel does not support.
        generation: of the GPU; None if it is none that kernels are made for.

    Raises:
        ValueError: unknown backend.
        RuntimeError: a fallback under ``strict``, or "mosaic" without a GPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"kernel backend {backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    asked = "automatic choice" if backend == "auto" else "as asked"
    if backend == "reference":
        logger.info("kernels: reference (%s)", asked)
        return _REFERENCE
    if backend == "mosaic" and platform == "cpu":
        raise RuntimeError("kernels: mosaic needs a GPU")
    if backend == "triton" and platform == "cpu":
        logger.warning("kernels: triton in the interpreter (%s, on cpu); this is slow, and for tests", asked)
        return _triton(INTERPRETED, strict, interpret=True)
    if platform == "cpu":
        logger.info("kernels: xla (%s, on cpu)", asked)
        return _XLA_CPU
    if backend == "xla":
        logger.info("kernels: xla (%s, on %s)", asked, platform)
        return _XLA_GPU
    if generation is None:
        why = f"there are no kernels for this device of platform {platform!r}"
        if strict:
            raise RuntimeError(f"kernels: {why}, and strict forbids the fallback to xla")
        logger.warning("kernels: xla, because %s", why)
        return _XLA_GPU
    name = "mosaic" if backend == "mosaic" else "triton"
    logger.info("kernels: %s (%s, for a GPU of generation %s)", name, asked, generation)
    ops = _triton(generation, strict, interpret=False)
    return _with_mosaic(ops, generation) if backend == "mosaic" else ops


def _triton(generation: Generation, strict: bool, interpret: bool) -> Ops:
    """Triton kernels; what one does not support goes to XLA. Plain products stay with XLA, which calls cuBLAS."""

    def preferred(name: str, kernel, supports, fallback) -> Preferred:  # type: ignore[no-untyped-def]
        return Preferred(name, "triton", kernel, supports, fallback, generation, strict, interpret)

    return Ops(
        attention=preferred(
            "attention",
            attention_triton.ragged_paged_attention,
            attention_triton.supports,
            _XLA_GPU.attention,
        ),
        rope_kv_write=preferred(
            "rope_kv_write",
            rope_kv_write_triton.rope_kv_write,
            rope_kv_write_triton.supports,
            _XLA_GPU.rope_kv_write,
        ),
        linear=_XLA_GPU.linear,
        grouped_matmul=preferred(
            "grouped_matmul",
            grouped_matmul_triton.grouped_matmul,
            grouped_matmul_triton.supports,
            _XLA_GPU.grouped_matmul,
        ),
        truncated_draw=preferred(
            "truncated_draw",
            sampling_triton.truncated_draw,
            sampling_triton.supports,
            sampling_xla.truncated_draw,
        ),
        platform="gpu",
    )


def _with_mosaic(ops: Ops, generation: Generation) -> Ops:
    """Mosaic attention where it can serve; the rest goes to Triton, which ``strict`` does not forbid."""
    attention = Preferred(
        "attention",
        "mosaic",
        attention_mosaic.ragged_paged_attention,
        attention_mosaic.supports,
        ops.attention,
        generation,
        strict=False,
        interpret=False,
    )
    return replace(ops, attention=attention)
