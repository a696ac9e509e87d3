"""How the devices of a replica share a model, by the rules that the engine shares it by."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxinfer.config import ParallelConfig
from jaxinfer.engine.model_setup import stage_starts
from jaxinfer.models.config import TransformerConfig
from sharding.axes import AxisRules
from sharding.layout import Layout
from sharding.mesh import EXPERT, TENSOR, axis_rules

Attention = Literal["shared", "data"]


@dataclass(frozen=True)
class Replica:
    """The devices of one replica.

    Attributes:
        tensor, expert, pipeline: as in ``ParallelConfig``.
        attention: ``shared``: all devices share heads, MLPs and vocabulary, and add their results, as the engine does.
            ``data``: each device has sequences of its own and all parameters but the experts, which tokens are sent
            to by all-to-all; a form that the engine does not have, for comparison.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    attention: Attention = "shared"

    @property
    def devices(self) -> int:
        return self.tensor * self.expert * self.pipeline

    @property
    def stage_devices(self) -> int:
        return self.tensor * self.expert

    @property
    def sequence_shares(self) -> int:
        """Devices of a stage that have different sequences."""
        return self.stage_devices if self.attention == "data" else 1

    @cached_property
    def rules(self) -> AxisRules:
        """Of one stage."""
        if self.attention == "shared":
            return axis_rules(self.tensor, self.expert)
        return AxisRules((("experts", (EXPERT,)),), ((EXPERT, self.expert), (TENSOR, self.tensor)))

    @cached_property
    def layout(self) -> Layout:
        """Of one stage, without devices: good for sizes."""
        return Layout(self.rules)

    def stages(self, num_layers: int) -> tuple[tuple[int, int], ...]:
        """First layer of each stage, and the first behind it. ValueError if there are more stages than layers."""
        starts = stage_starts(ParallelConfig(pipeline=self.pipeline), num_layers)
        return tuple(zip(starts, (*starts[1:], num_layers)))

    @property
    def label(self) -> str:
        names = (("TP", self.tensor), ("EP", self.expert), ("PP", self.pipeline))
        parts = [f"{name}{size}" for name, size in names if size > 1] or ["1 GPU"]
        return " ".join(parts) + (", attention by data" if self.attention == "data" else "")


def candidates(
    config: TransformerConfig,
    node_size: int,
    max_devices: int,
    attention: Attention = "shared",
    disaggregated: bool = False,
) -> Iterator[Replica]:
    """Layouts worth trying, small ones first; whether the devices can share the model is not known yet.

    Tensor and expert parallelism beyond a node only by whole nodes, pipelines of up to eight stages within a node.
    Disaggregated engines have one stage on one node: K and V of others do not travel (``jaxinfer.config``).
    """
    sizes = [2**i for i in range(max_devices.bit_length()) if 2**i <= max_devices]
    experts = 1 if config.moe is None else config.moe.num_experts
    found = []
    if attention == "data":
        found = [Replica(expert=size, attention=attention) for size in sizes if experts % size == 0]
        yield from found
        return
    for pipeline in (1, 2, 4, 8):
        for stage in sizes:
            if stage * pipeline > max_devices or (stage > node_size and stage % node_size):
                continue
            if pipeline > 1 and (disaggregated or stage * pipeline > node_size):
                continue
            if disaggregated and stage > node_size:
                continue
            for expert in (size for size in sizes if size <= stage and experts % size == 0):
                found.append(Replica(stage // expert, expert, pipeline))
    yield from sorted(found, key=lambda replica: (replica.devices, replica.pipeline))
