"""From the sizes of a deployment to meshes of devices."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.axes import AxisRules
from sharding.layout import ONE_DEVICE, Layout
from sharding.rows import RowExchange

CONTEXT, EXPERT, TENSOR = "context", "expert", "tensor"


def axis_rules(
    tensor: int, expert: int, context: int = 1, row_exchange: RowExchange | None = None
) -> AxisRules:
    """The rules of tensor, expert and context parallelism.

    Experts are spread over the expert axis and their width over the others. MLPs and vocabulary are spread over all
    axes. So are heads without a context axis, and no device computes what another one does. The devices along the
    context axis share the slots of the KV cache instead: each of them has the queries of all heads that its position
    on the other axes gives it, and attends to its own slots. What they make of these heads is merged ("merged_heads"),
    after which each has as many heads as if they shared those, too.
    """
    both, all_axes = (EXPERT, TENSOR), (CONTEXT, EXPERT, TENSOR)
    return AxisRules(
        mesh_axes=(
            ("vocab", all_axes),
            ("heads", both),
            ("kv_heads", both),
            ("slots", (CONTEXT,)),
            ("merged_heads", (*both, CONTEXT)),
            ("mlp", all_axes),
            ("experts", (EXPERT,)),
            ("expert_mlp", (CONTEXT, TENSOR)),
        ),
        sizes=((CONTEXT, context), (EXPERT, expert), (TENSOR, tensor)),
        row_exchange=row_exchange,
    )


def make_layout(
    devices: Sequence[jax.Device],
    tensor: int,
    expert: int,
    context: int = 1,
    exchange_from: int | None = None,
) -> Layout:
    """The layout over the first ``tensor * expert * context`` devices; see ``make_layouts``."""
    return make_layouts(devices, tensor, expert, 1, context, exchange_from=exchange_from)[0]


def make_layouts(
    devices: Sequence[jax.Device],
    tensor: int,
    expert: int,
    pipeline: int,
    context: int = 1,
    committed: bool = False,
    exchange_from: int | None = None,
) -> tuple[Layout, ...]:
    """The layout of each stage of a pipeline, over ``tensor * expert * context`` devices that follow each other.

    Args:
        committed: arrays belong to their device even if there is only one. Where some arrays do so, as those that come
            from another process, all have to: what was compiled for others is compiled again for them.
        exchange_from: programs of so many rows, and more, split and exchange them in sparse layers; None: none do.

    Raises:
        ValueError: there are fewer devices.
    """
    sizes = {"tensor": tensor, "expert": expert, "pipeline": pipeline}
    if context > 1:
        sizes["context"] = context
    wanted = math.prod(sizes.values())
    if wanted > len(devices):
        raise ValueError(
            f"{' x '.join(f'parallel.{name}' for name in sizes)} is {' x '.join(map(str, sizes.values()))} = {wanted}, "
            f"but there are {len(devices)} devices of platform {devices[0].platform!r}"
        )
    if wanted == 1 and not committed:
        return (ONE_DEVICE,)
    grid = np.array(devices[:wanted]).reshape(pipeline, context, expert, tensor)
    # XLA's CPU backend has no ragged all-to-all.
    ragged = devices[0].platform == "gpu"
    exchange = None if exchange_from is None else RowExchange(exchange_from, ragged)
    rules = axis_rules(tensor, expert, context, exchange)
    return tuple(Layout(rules, Mesh(stage, (CONTEXT, EXPERT, TENSOR))) for stage in grid)
