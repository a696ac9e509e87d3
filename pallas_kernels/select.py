"""Chooses the backend of every op once, at start-up."""

import logging
from dataclasses import replace

from pallas_kernels.gate import native as gate_native
from pallas_kernels.gpus import Generation
from pallas_kernels.grouped_matmul import reference as grouped_matmul_reference
from pallas_kernels.grouped_matmul import xla as grouped_matmul_xla
from pallas_kernels.grouped_matmul import xla_gpu as grouped_matmul_xla_gpu
from pallas_kernels.kv_write import reference as kv_write_reference
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.linear import native as linear_native
from pallas_kernels.linear import reference as linear_reference
from pallas_kernels.linear import xla as linear_xla
from pallas_kernels.linear import xla_cpu as linear_xla_cpu
from pallas_kernels.linear.formats import FORMATS
from pallas_kernels.mla_attention import reference as mla_attention_reference
from pallas_kernels.mla_attention import xla as mla_attention_xla
from pallas_kernels.native import library as native_library
from pallas_kernels.ops import Ops
from pallas_kernels.ragged_paged_attention import native as attention_native
from pallas_kernels.ragged_paged_attention import reference as attention_reference
from pallas_kernels.ragged_paged_attention import xla as attention_xla
from pallas_kernels.rms_norm import native as rms_norm_native
from pallas_kernels.rope_kv_write import native as rope_kv_write_native
from pallas_kernels.rope_kv_write import reference as rope_kv_write_reference
from pallas_kernels.rope_kv_write import xla as rope_kv_write_xla

BACKENDS = ("auto", "xla", "native", "triton", "mosaic", "reference")
INTERPRETED: Generation = "hopper"
"""What kernels are compiled for where no GPU is: in the interpreter it decides tuning choices only."""

logger = logging.getLogger(__name__)

_XLA_GPU = Ops(
    attention=attention_xla.ragged_paged_attention,
    rope_kv_write=rope_kv_write_xla.rope_kv_write,
    mla_attention=mla_attention_xla.mla_attention,
    kv_write=kv_write_xla.kv_write,
    linear=linear_xla.linear,
    rows=linear_xla.rows,
    grouped_matmul=grouped_matmul_xla_gpu.grouped_matmul,
    truncated_draw=None,
    attention_share=attention_xla.ragged_paged_attention_share,
    mla_attention_share=mla_attention_xla.mla_attention_share,
    platform="gpu",
)
_XLA_CPU = replace(
    _XLA_GPU, linear=linear_xla_cpu.linear, grouped_matmul=grouped_matmul_xla.grouped_matmul, platform="cpu"
)
_NATIVE = replace(
    _XLA_CPU,
    attention=attention_native.ragged_paged_attention,
    rope_kv_write=rope_kv_write_native.rope_kv_write,
    linear=linear_native.linear,
    linear_int8=linear_native.linear_int8,
    linear_bf16=linear_native.linear_bf16,
    rows=linear_native.rows,
    rms_norm=rms_norm_native.rms_norm,
    gate=gate_native.gate,
    packed_formats=tuple(FORMATS),
)
_REFERENCE = Ops(
    attention=attention_reference.ragged_paged_attention,
    rope_kv_write=rope_kv_write_reference.rope_kv_write,
    mla_attention=mla_attention_reference.mla_attention,
    kv_write=kv_write_reference.kv_write,
    linear=linear_reference.linear,
    rows=linear_xla.rows,
    grouped_matmul=grouped_matmul_reference.grouped_matmul,
    truncated_draw=None,
    platform="cpu",
    attention_share=attention_reference.ragged_paged_attention_share,
    mla_attention_share=mla_attention_reference.mla_attention_share,
)


def select_ops(
    backend: str,
    platform: str,
    strict: bool,
    generation: Generation | None = None,
    *,
    shared_slots: bool = False,
) -> Ops:
    """The ops a model runs with.

    Args:
        backend: "xla", "native", "triton", "reference", or "auto" for the fastest one that exists for the platform:
            "triton" on GPUs, "native" on CPUs where its library is built. "mosaic" is "triton" with Hopper's own
            attention of prefill chunks, which becomes the automatic choice once it is measured to be faster. Without a
            GPU Triton kernels run in Pallas's interpreter, for tests.
        platform: what ``jax.default_backend()`` says: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
        strict: a fallback to XLA is an error instead of a warning, at start-up or when an op is first called with
            arguments that its kernel does not support.
        generation: of the GPU; None if it is none that kernels are made for.
        shared_slots: devices share the slots of the KV cache. "native" has no attention over a share: it is XLA's,
            which counts as a fallback. What "triton" has none for is told when the op is called.

    Raises:
        ValueError: unknown backend.
        RuntimeError: a fallback under ``strict``, "mosaic" without a GPU, or "native" with one.
    """
    ops = _select(backend, platform, strict, generation)
    if shared_slots and ops == _NATIVE:
        why = "native has no attention over a context that devices share (parallel.context)"
        if strict:
            raise RuntimeError(f"kernels: {why}, and strict forbids the fallback to xla")
        logger.warning("kernels: xla for attention, because %s", why)
    return ops


def _select(backend: str, platform: str, strict: bool, generation: Generation | None) -> Ops:
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
        return _gpu_ops(INTERPRETED, strict, interpret=True)
    if platform == "cpu" and backend in ("auto", "native"):
        usable, why = native_library.available()
        if usable:
            logger.info("kernels: native (%s, on cpu)", asked)
            return _NATIVE
        if strict and backend == "native":
            raise RuntimeError(f"kernels: {why}, and strict forbids the fallback to xla")
        logger.log(
            logging.WARNING if backend == "native" else logging.INFO, "kernels: not native, because %s", why
        )
    if backend == "native" and platform != "cpu":
        raise RuntimeError("kernels: native needs a CPU")
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
    return _gpu_ops(generation, strict, mosaic=backend == "mosaic")


def _gpu_ops(generation: Generation, strict: bool, *, interpret: bool = False, mosaic: bool = False) -> Ops:
    # Imported where it is needed: Pallas's GPU languages are a quarter of the time that all imports of a start take.
    from pallas_kernels.select_gpu import triton_ops, with_mosaic

    ops = triton_ops(_XLA_GPU, generation, strict, interpret)
    return with_mosaic(ops, generation) if mosaic else ops
