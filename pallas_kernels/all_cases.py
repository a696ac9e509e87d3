"""The shipped shapes of all ops, in one list."""

from pallas_kernels.gate_quantize import cases as gate_quantize
from pallas_kernels.grouped_matmul import cases as grouped_matmul
from pallas_kernels.kernel_case import KernelCase
from pallas_kernels.kv_write import cases as kv_write
from pallas_kernels.mla_attention import cases as mla_attention
from pallas_kernels.quantize_rows import cases as quantize_rows
from pallas_kernels.quantized_matmul import cases as quantized_matmul
from pallas_kernels.ragged_paged_attention import cases as ragged_paged_attention
from pallas_kernels.ragged_paged_attention import mosaic_cases as ragged_paged_attention_mosaic
from pallas_kernels.rms_norm_quantize import cases as rms_norm_quantize
from pallas_kernels.rope_kv_write import cases as rope_kv_write
from pallas_kernels.sampling import cases as sampling
from pallas_kernels.speculative_verify import cases as speculative_verify

_OPS = (
    ragged_paged_attention,
    ragged_paged_attention_mosaic,
    kv_write,
    rope_kv_write,
    mla_attention,
    quantized_matmul,
    grouped_matmul,
    sampling,
    speculative_verify,
    rms_norm_quantize,
    gate_quantize,
    quantize_rows,
)


def all_cases() -> tuple[KernelCase, ...]:
    """Every case of every op, in the order of the docs."""
    return tuple(case for op in _OPS for case in op.kernel_cases())


def find_case(op: str, backend: str, name: str) -> KernelCase:
    """The case that has this name.

    Raises:
        KeyError: there is none, or more than one.
    """
    found = [case for case in all_cases() if (case.op, case.backend, case.name) == (op, backend, name)]
    if len(found) != 1:
        raise KeyError(f"{len(found)} cases are named {op}/{backend}/{name}")
    return found[0]
