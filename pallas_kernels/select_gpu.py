"""The ops of NVIDIA GPUs, with kernels in Triton and Mosaic."""

from dataclasses import replace
from typing import Any

from pallas_kernels.gpus import Generation
from pallas_kernels.grouped_matmul import triton as grouped_matmul_triton
from pallas_kernels.kv_write import triton as kv_write_triton
from pallas_kernels.mla_attention import triton as mla_attention_triton
from pallas_kernels.ops import Ops
from pallas_kernels.preferred import Preferred
from pallas_kernels.ragged_paged_attention import mosaic as attention_mosaic
from pallas_kernels.ragged_paged_attention import triton as attention_triton
from pallas_kernels.rope_kv_write import triton as rope_kv_write_triton
from pallas_kernels.sampling import triton as sampling_triton
from pallas_kernels.sampling import xla as sampling_xla


def triton_ops(xla: Ops, generation: Generation, strict: bool, interpret: bool) -> Ops:
    """Triton kernels; what one does not support goes to XLA. Plain products stay with XLA, which calls cuBLAS.

    Args:
        xla: the ops for GPUs without kernels of our own.
    """

    def preferred(name: str, kernel, supports, fallback) -> Preferred:  # type: ignore[no-untyped-def]
        return Preferred(name, "triton", kernel, supports, fallback, generation, strict, interpret)

    return Ops(
        attention=preferred(
            "attention",
            attention_triton.ragged_paged_attention,
            attention_triton.supports,
            xla.attention,
        ),
        rope_kv_write=preferred(
            "rope_kv_write",
            rope_kv_write_triton.rope_kv_write,
            rope_kv_write_triton.supports,
            xla.rope_kv_write,
        ),
        mla_attention=preferred(
            "mla_attention",
            mla_attention_triton.mla_attention,
            mla_attention_triton.supports,
            xla.mla_attention,
        ),
        kv_write=preferred("kv_write", kv_write_triton.kv_write, kv_write_triton.supports, xla.kv_write),
        linear=xla.linear,
        rows=xla.rows,
        grouped_matmul=preferred(
            "grouped_matmul",
            grouped_matmul_triton.grouped_matmul,
            grouped_matmul_triton.supports,
            xla.grouped_matmul,
        ),
        truncated_draw=preferred(
            "truncated_draw",
            sampling_triton.truncated_draw,
            sampling_triton.supports,
            sampling_xla.truncated_draw,
        ),
        attention_share=preferred(
            "attention_share",
            attention_triton.ragged_paged_attention_share,
            attention_triton.supports_share,
            xla.attention_share,
        ),
        mla_attention_share=preferred(
            "mla_attention_share",
            xla.mla_attention_share,
            _no_kernel,
            xla.mla_attention_share,
        ),
        platform="gpu",
    )


def _no_kernel(*args: Any, **options: Any) -> tuple[bool, str]:
    return False, "latent attention over a share of the context has no kernel"


def with_mosaic(ops: Ops, generation: Generation) -> Ops:
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
