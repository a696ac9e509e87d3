"""Kernels under tensor parallelism: each device runs them on the heads it holds.

A compiler that partitions a program cannot look into a kernel. Attention and the KV write treat every KV head and its
queries alone, so each device runs them on its share, without any communication.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class OverHeads:
    """An op whose heads are independent, with its heads spread over a mesh axis. Hashable if the op is.

    It is to be called while a mesh with that axis is current (``jax.set_mesh``); the axis must divide the KV heads.

    Attributes:
        args: how each positional argument is sharded.
        options: how keyword arguments that are arrays are sharded; they may be absent or None. All others are static.
        out: how the results are sharded.
    """

    op: Callable[..., Any]
    args: tuple[PartitionSpec, ...]
    options: tuple[tuple[str, PartitionSpec], ...]
    out: Any

    def __call__(self, *args: jax.Array, **options: Any) -> Any:
        specs = {name: spec for name, spec in self.options if options.get(name) is not None}
        arrays = {name: options[name] for name in specs}
        static = {name: value for name, value in options.items() if name not in specs}

        def run(args: tuple[jax.Array, ...], arrays: dict[str, jax.Array]) -> Any:
            return self.op(*args, **arrays, **static)

        # Kernels do not say over which axes their results vary, so that cannot be checked.
        sharded = jax.shard_map(run, in_specs=(self.args, specs), out_specs=self.out, check_vma=False)
        return sharded(args, arrays)


def attention_over_heads(attention: Callable[..., jax.Array], axis: str) -> OverHeads:
    """Ragged paged attention with queries and pools sharded over heads, tables replicated."""
    heads, all_of_it = PartitionSpec(None, axis), PartitionSpec()
    per_head = PartitionSpec(axis)
    return OverHeads(
        attention,
        args=(heads, heads, heads, all_of_it, all_of_it, all_of_it),
        options=(
            ("sinks_H", per_head),
            ("k_scale_K", per_head),
            ("v_scale_K", per_head),
            ("ancestors_TU", all_of_it),
        ),
        out=heads,
    )


def rope_kv_write_over_heads(
    rope_kv_write: Callable[..., tuple[jax.Array, jax.Array, jax.Array]], axis: str
) -> OverHeads:
    """Rope and the KV write with pools and projections sharded over heads; the projection's output holds the queries,
    keys and values of one device after those of the other."""
    heads, per_head, all_of_it = PartitionSpec(None, axis), PartitionSpec(axis), PartitionSpec()
    return OverHeads(
        rope_kv_write,
        args=(heads, all_of_it, all_of_it, heads, heads, all_of_it),
        options=(
            ("k_scale_K", per_head),
            ("v_scale_K", per_head),
            ("q_norm_h", all_of_it),
            ("k_norm_h", all_of_it),
        ),
        out=(heads, heads, heads),
    )
