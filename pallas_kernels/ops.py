"""The set of op implementations a model runs with, chosen once at start-up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax

from pallas_kernels.gate.reference import gate
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.sampling.reference import Draws


class Shards(Protocol):
    """How devices that run one program share its arrays. Logical axes have names; see ``sharding.axes``."""

    def size(self, name: str | None) -> int:
        """Number of shares of a logical axis."""
        ...

    def local(self, axis: Any, size: int) -> int:
        """Entries of a dimension of ``size`` entries that one device holds; ``axis`` as ``sharding.axes.Axis``."""
        ...

    def index(self, name: str | None) -> jax.Array | int:
        """Which share of a logical axis this device holds."""
        ...

    def sum(self, x: jax.Array, *names: str | None, split_rows: bool = False) -> jax.Array:
        """The sum of what the devices hold that share these logical axes.

        Args:
            split_rows: each gets its own rows only.
        """
        ...

    def join(self, x: jax.Array, name: str | None) -> jax.Array:
        """The shares of a logical axis, one behind the other along the last dimension."""
        ...

    def splits(self, rows: int) -> bool:
        """Whether the devices that share experts split the rows of sparse layers, in a program of so many rows."""
        ...

    def own_rows(self, x: jax.Array) -> jax.Array:
        """This device's rows of what all have."""
        ...

    def join_rows(self, x: jax.Array) -> jax.Array:
        """The rows of all devices."""
        ...

    def exchange_rows(self, x: jax.Array, send_N: jax.Array, receive_N: jax.Array) -> jax.Array:
        """Sends block d of N blocks of rows to device d, of each the first ``send_N`` rows; see ``sharding.rows``."""
        ...

    def deal(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        """``[N, ...]``: this device's N-th of a dimension, as each of N devices that share a logical axis has it."""
        ...


@dataclass(frozen=True)
class OneDevice:
    """``Shards`` of a program that runs alone."""

    def size(self, name: str | None) -> int:
        return 1

    def local(self, axis: Any, size: int) -> int:
        return size

    def index(self, name: str | None) -> jax.Array | int:
        return 0

    def sum(self, x: jax.Array, *names: str | None, split_rows: bool = False) -> jax.Array:
        return x

    def join(self, x: jax.Array, name: str | None) -> jax.Array:
        return x

    def splits(self, rows: int) -> bool:
        return False

    def own_rows(self, x: jax.Array) -> jax.Array:
        return x

    def join_rows(self, x: jax.Array) -> jax.Array:
        return x

    def exchange_rows(self, x: jax.Array, send_N: jax.Array, receive_N: jax.Array) -> jax.Array:
        return x

    def deal(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        return x[None]


ALONE: Shards = OneDevice()


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
        linear_bf16: ``linear`` with activations rounded to bfloat16 for weights of that type; None: there is none.
        rms_norm: ``rms_norm``.
        gate: ``gate``.
        packed_formats: formats of ``PackedWeight`` that are computed with as they are; empty: arrays only.
        grouped_matmul: ``grouped_matmul``.
        truncated_draw: ``truncated_draw`` of ``sampling``; None: the sampler's own formulation, which is made for CPUs.
        platform: "cpu" or "gpu": the kind of device that the ops are made for, which decides how pools are held.
        attention_share, mla_attention_share: the attentions over the slots that one of several devices holds; None: the
            model does not run on devices that share slots.
        shards: what the devices that run the model together hold of it, and how they add or join their shares.
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
    linear_bf16: Callable[..., jax.Array] | None = None
    rms_norm: Callable[..., tuple[jax.Array, jax.Array]] = rms_norm
    gate: Callable[..., jax.Array] = gate
    packed_formats: tuple[str, ...] = ()
    attention_share: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    mla_attention_share: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    shards: Shards = ALONE
