"""From the sizes of a deployment to meshes of devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.axes import AxisRules
from sharding.layout import ONE_DEVICE, Layout
from sharding.rows import RowExchange

EXPERT, TENSOR = "expert", "tensor"


def axis_rules(tensor: int, expert: int, row_exchange: RowExchange | None = None) -> AxisRules:
    """The rules of tensor and expert parallelism.

    Experts are spread over the expert axis and their width over the tensor axis. All else (heads, MLPs, vocabulary) is
    spread over both, so no device computes what another one does.
    """
    both = (EXPERT, TENSOR)
    return AxisRules(
        mesh_axes=(
            ("vocab", both),
            ("heads", both),
            ("kv_heads", both),
            ("mlp", both),
            ("experts", (EXPERT,)),
            ("expert_mlp", (TENSOR,)),
        ),
        sizes=((EXPERT, expert), (TENSOR, tensor)),
        row_exchange=row_exchange,
    )


def make_layout(
    devices: Sequence[jax.Device], tensor: int, expert: int, exchange_from: int | None = None
) -> Layout:
    """The layout over the first ``tensor * expert`` devices; see ``make_layouts``."""
    return make_layouts(devices, tensor, expert, 1, exchange_from=exchange_from)[0]


def make_layouts(
    devices: Sequence[jax.Device],
    tensor: int,
    expert: int,
    pipeline: int,
    committed: bool = False,
    exchange_from: int | None = None,
) -> tuple[Layout, ...]:
    """The layout of each stage of a pipeline, over ``tensor * expert`` devices that follow each other.

    Args:
        committed: arrays belong to their device even if there is only one. Where some arrays do so, as those that come
            from another process, all have to: what was compiled for others is compiled again for them.
        exchange_from: programs of so many rows, and more, split and exchange them in sparse layers; None: none do.

    Raises:
        ValueError: there are fewer devices.
    """
    size = tensor * expert
    wanted = size * pipeline
    if wanted > len(devices):
        raise ValueError(
            f"parallel.tensor x parallel.expert x parallel.pipeline is {tensor} x {expert} x {pipeline} = {wanted}, "
            f"but there are {len(devices)} devices of platform {devices[0].platform!r}"
        )
    if wanted == 1 and not committed:
        return (ONE_DEVICE,)
    grid = np.array(devices[:wanted]).reshape(pipeline, expert, tensor)
    # XLA's CPU backend has no ragged all-to-all.
    ragged = devices[0].platform == "gpu"
    exchange = None if exchange_from is None else RowExchange(exchange_from, ragged)
    rules = axis_rules(tensor, expert, exchange)
    return tuple(Layout(rules, Mesh(stage, (EXPERT, TENSOR))) for stage in grid)
