"""Shipped shapes of the Mosaic attention: prefill on Hopper."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpus import Generation
from pallas_kernels.kernel_case import KernelCase, Limits
from pallas_kernels.ragged_paged_attention import mosaic, mosaic_tuning, triton
from pallas_kernels.ragged_paged_attention.cases import LLAMA, QWEN, SMOLLM, Model, Shape, triton_case
from pallas_kernels.ragged_paged_attention.mosaic_tuning import Choice

GEMMA_27B = Model("gemma2-27b", 32, 16, 128, window=4096, soft_cap=50.0)

STEPS = (
    Shape("prefill-t2048-c2048", LLAMA, ((2048, 2048),), quick=True),
    Shape("prefill-t8192-c8192", LLAMA, ((8192, 8192),)),
    Shape("prefill-t2048-c8192", LLAMA, ((2048, 8192),)),
    Shape("prefill-t2048-rows4", LLAMA, ((700, 700), (512, 4096), (511, 511), (325, 1000))),
    Shape("mixed-t2048-b64", LLAMA, (*((1, 2048),) * 63, (1985, 1985))),
    Shape("prefill-t2048-c2048", QWEN, ((2048, 2048),)),
    Shape("prefill-t8192-c8192", QWEN, ((8192, 8192),)),
    Shape("prefill-t2048-c2048", SMOLLM, ((2048, 2048),)),
    Shape("prefill-t2048-c8192", GEMMA_27B, ((2048, 8192),)),
)


def kernel_cases() -> tuple[KernelCase, ...]:
    """Every shipped case of the Mosaic backend."""
    return tuple(map(_case, STEPS))


def _case(shape: Shape) -> KernelCase:
    model = shape.model
    case = triton_case(shape)
    q_THh, k_NKSh, _, table_RM, *_ = jax.eval_shape(case.inputs, jax.ShapeDtypeStruct((2,), jnp.uint32))
    facts = triton.facts(q_THh, k_NKSh, table_RM, model.window)

    def build(generation: Generation, choice: Choice | None) -> Callable[..., Any]:
        op = partial(
            mosaic.ragged_paged_attention,
            scale=model.h**-0.5,
            window=model.window,
            soft_cap=model.soft_cap,
            generation=generation,
            choice=choice,
        )
        return lambda *arrays: op(*arrays[:6], **arrays[6])

    return replace(
        case,
        backend="mosaic",
        generations=("hopper",),
        build=build,
        candidates=mosaic_tuning.candidates("hopper", facts),
        tuning_key=mosaic_tuning.key(facts),
        limits=Limits(tensor_core="wgmma", temp_bytes=64 << 20),
    )
