"""The set of op implementations a model runs with, chosen once at start-up."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Ops:
    """One implementation per op; see the op folders for signatures and semantics.

    Attributes:
        attention: ``ragged_paged_attention``.
        kv_write: ``kv_write``.
        linear: ``linear``.
        grouped_matmul: ``grouped_matmul``.
    """

    attention: Callable[..., jax.Array]
    kv_write: Callable[..., tuple[jax.Array, jax.Array]]
    linear: Callable[..., jax.Array]
    grouped_matmul: Callable[..., jax.Array]
