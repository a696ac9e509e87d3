"""The layout that serves a load with the fewest devices."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxinfer.planning.assumptions import Assumptions
from jaxinfer.planning.layouts import Attention, Replica, candidates
from jaxinfer.planning.load import Load, Techniques
from jaxinfer.planning.parts import ModelParts
from jaxinfer.planning.pools import BUSY, serve_decode, serve_prefill
from jaxinfer.planning.service import (
    CHUNKS,
    MAX_SEQUENCES,
    ReplicaModel,
    Serve,
    Service,
    batches,
    best_service,
    serve,
)
from pallas_kernels.gpus import Gpu

Purpose = Literal["all", "prefill", "decode"]

MAX_DEVICES = 64
"""Devices of the largest replica that is tried."""


@dataclass(frozen=True)
class Pool:
    """Equal replicas.

    Attributes:
        rate: requests per second that reach the pool.
    """

    purpose: Purpose
    model: ReplicaModel
    service: Service
    rate: float

    @property
    def replicas(self) -> int:
        return math.ceil(self.rate / self.service.rate)

    @property
    def devices(self) -> int:
        return self.replicas * self.model.replica.devices

    @property
    def exact_devices(self) -> float:
        """Devices if parts of a replica could be had: what is compared, so that a small load does not hide what a
        layout costs."""
        return self.rate / self.service.rate * self.model.replica.devices


@dataclass(frozen=True)
class Plan:
    """What a load takes.

    Attributes:
        pools: one, or those of prefill and decode.
        refused: layouts that were tried and cannot be, with the reason.
    """

    load: Load
    techniques: Techniques
    pools: tuple[Pool, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def ttft(self) -> float:
        return max(pool.service.ttft for pool in self.pools)

    @property
    def tpot(self) -> float:
        return max(pool.service.tpot for pool in self.pools)

    @property
    def gap(self) -> float:
        return max(pool.service.gap for pool in self.pools)

    @property
    def tokens_per_device(self) -> float:
        """Output tokens per second and device, if all replicas are as busy as they may be."""
        return self.load.rate * self.load.output / sum(pool.exact_devices for pool in self.pools)


class NoPlanError(ValueError):
    """No layout holds the model, or none is fast enough; the message lists what was tried."""


def make_plan(
    parts: ModelParts,
    gpu: Gpu,
    load: Load,
    techniques: Techniques,
    assumed: Assumptions,
    replica: Replica | None = None,
    attention: Attention = "shared",
    max_devices: int = MAX_DEVICES,
) -> Plan:
    """Finds layout, sequences and chunks.

    Args:
        replica: the layout, if it is given.
        attention: which kind of layouts to search.

    Raises:
        NoPlanError: there is none.
        ValueError: the given layout cannot share the model.
    """
    refused: list[tuple[str, str]] = []
    if replica is not None:
        models = [ReplicaModel.make(parts, replica, gpu, techniques, assumed)]
    else:
        tried = candidates(
            parts.config, int(assumed.node_size), max_devices, attention, techniques.disaggregated
        )
        models = list(_valid(parts, tried, gpu, techniques, assumed, refused))
    purposes: tuple[Purpose, ...] = ("prefill", "decode") if techniques.disaggregated else ("all",)
    pools = tuple(_best(purpose, models, load, refused) for purpose in purposes)
    return Plan(load, techniques, pools, tuple(dict.fromkeys(refused)))


def _valid(
    parts: ModelParts,
    tried: Iterable[Replica],
    gpu: Gpu,
    techniques: Techniques,
    assumed: Assumptions,
    refused: list[tuple[str, str]],
) -> Iterator[ReplicaModel]:
    for replica in tried:
        try:
            yield ReplicaModel.make(parts, replica, gpu, techniques, assumed)
        except ValueError as error:
            refused.append((replica.label, str(error)))


def _serving(purpose: Purpose, replica: Replica) -> tuple[Serve, Sequence[float], Sequence[int]]:
    """How a pool serves, and which sizes and chunks to try."""
    sizes = batches(MAX_SEQUENCES * replica.sequence_shares)
    match purpose:
        case "all":
            return serve, sizes, CHUNKS
        case "prefill":
            return serve_prefill, BUSY, CHUNKS
        case "decode":
            return serve_decode, sizes, (0,)


def _best(
    purpose: Purpose, models: Iterable[ReplicaModel], load: Load, refused: list[tuple[str, str]]
) -> Pool:
    best: Pool | None = None
    for model in models:
        how, sizes, chunks = _serving(purpose, model.replica)
        service = best_service(model, load, how, sizes, chunks)
        if service is None:
            least = [how(model, load, sizes[0], chunk) for chunk in chunks]
            refused.append((model.replica.label, _why_not(model, list(filter(None, least)), load)))
            continue
        pool = Pool(purpose, model, service, load.rate)
        if best is None or pool.exact_devices < best.exact_devices:
            best = pool
    if best is None:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in refused)
        raise NoPlanError(f"no layout serves this load ({purpose}). Tried: {reasons}")
    return best


def _why_not(model: ReplicaModel, least: list[Service], load: Load) -> str:
    """Args:
    least: what it does with as little at a time as possible.
    """
    if not least:
        free = min(model.free_memory(1, 1)) / 2**30
        if free <= 0:
            return f"weights and temporaries take {-free:.1f} GiB more than a device has"
        return f"{free:.1f} GiB for the cache hold no sequence of this length"
    quickest = ", ".join(
        f"{name} {min(getattr(s, name) for s in least):.3g} (limit {getattr(load, name):.3g})"
        for name in ("ttft", "tpot", "gap")
    )
    return f"not all limits together; each at best, in seconds: {quickest}"
