"""The set of op implementations a model runs with, chosen once at start-up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.gate.reference import gate
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.sampling.reference import Draws


@dataclass(frozen=True)
class Ops:
    """One implementation per op; see the op folders for signatures and semantics.

    Attributes:
        attention: ``ragged_paged_attention``.
        rope_kv_write: ``rope_kv_write``.
        mla_attention: ``mla_attention``.
        kv_write: ``kv_write``: what latent attention caches, which has a rotation and norms of its own.
        linear: ``linear``; takes weights as arrays, and packed in one of ``packed_formats``.
        rows: ``rows`` of ``linear``: looks rows of a weight up; takes the same weights.
        linear_int8: ``linear`` with 8-bit activations for quantized weights, which is not exact; None: there is none.
        rms_norm: ``rms_norm``.
        gate: ``gate``.
        packed_formats: formats of ``PackedWeight`` that are computed with as they are; empty: arrays only.
        grouped_matmul: ``grouped_matmul``.
        truncated_draw: ``truncated_draw`` of ``sampling``; None: the sampler's own formulation, which is made for CPUs.
        platform: "cpu" or "gpu": the kind of device that the ops are made for, which decides how pools are held.
    """

    attention: Callable[..., jax.Array]
    rope_kv_write: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    mla_attention: Callable[..., jax.Array]
    kv_write: Callable[..., tuple[jax.Array, jax.Array]]
    linear: Callable[..., jax.Array]
    rows: Callable[..., jax.Array]
    grouped_matmul: Callable[..., jax.Array]
    truncated_draw: Callable[..., Draws] | None
    platform: Literal["cpu", "gpu"]
    linear_int8: Callable[..., jax.Array] | None = None
    rms_norm: Callable[..., tuple[jax.Array, jax.Array]] = rms_norm
    gate: Callable[..., jax.Array] = gate
    packed_formats: tuple[str, ...] = ()
