"""Bytes and time between devices: all-reduces of shared layers, all-to-alls of experts, hidden states of stages."""

import math
from dataclasses import dataclass

from jaxinfer.models.config import TransformerConfig
from jaxinfer.planning.assumptions import Assumptions
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import Techniques
from pallas_kernels.gpus import Gpu

_BF16 = 2


@dataclass(frozen=True)
class Exchange:
    """What the devices of a stage send in a step.

    Attributes:
        hidden_size: values of a token.
        reductions: all-reduces of the hidden states of all tokens.
        rounds: all-to-alls there and back.
        copies: devices that a token is sent to in a round, in the mean; ``node_copies``: nodes other than its own.
        sent_bytes: of a value on its way to an expert; it comes back in bfloat16.
        handed_on: whether a stage follows, which gets the hidden states.
    """

    replica: Replica
    gpu: Gpu
    assumed: Assumptions
    hidden_size: int
    reductions: int
    rounds: int
    copies: float
    node_copies: float
    sent_bytes: int
    handed_on: bool

    @classmethod
    def of_stage(
        cls,
        config: TransformerConfig,
        replica: Replica,
        gpu: Gpu,
        assumed: Assumptions,
        techniques: Techniques,
        first: int,
        stop: int,
    ) -> "Exchange":
        """That of the layers from ``first`` to ``stop``. Collectives of the engine: docs/parallel.md."""
        moe, n = config.moe, replica.stage_devices
        sparse = 0 if moe is None else sum(moe.sparse_layers[first:stop])
        shared = sparse if moe is not None and moe.shared_size else 0
        by_data = replica.attention == "data"
        chosen = 0 if moe is None else moe.experts_per_token
        nodes = math.ceil(n / assumed.node_size)
        # Groups of experts are made for this: a token's experts lie in few of them, and a group on few nodes.
        groups = chosen if moe is None or moe.groups is None else moe.groups.chosen
        return cls(
            replica=replica,
            gpu=gpu,
            assumed=assumed,
            hidden_size=config.hidden_size,
            reductions=0 if by_data or n == 1 else 2 * (stop - first) + shared + (first == 0),
            rounds=sparse if by_data and n > 1 else 0,
            copies=_others(n, chosen),
            node_copies=_others(nodes, groups),
            sent_bytes=1 if techniques.weights == "fp8" else _BF16,
            handed_on=stop < config.num_layers,
        )

    def seconds(self, tokens: float) -> float:
        """Time of a step in which each device has so many tokens."""
        return (
            self.reductions * self._all_reduce(tokens)
            + self.rounds * self._all_to_all(tokens) * (1 - self.assumed.exchange_overlap)
            + (self._hand_on(tokens) if self.handed_on else 0.0)
        )

    def _all_reduce(self, tokens: float) -> float:
        """A ring within the node, and rings of devices of the same rank between nodes."""
        size = tokens * self.hidden_size * _BF16
        n = self.replica.stage_devices
        inside = min(n, int(self.assumed.node_size))
        nodes = math.ceil(n / inside)
        time = 2 * (inside - 1) / inside * size / self._link + self.assumed.link_latency
        if nodes > 1:
            time += 2 * (nodes - 1) / nodes * size / inside / self._network + self.assumed.network_latency
        return time

    def _all_to_all(self, tokens: float) -> float:
        """There and back. A token goes to another node once, and from there over NVLink (DeepEP's normal kernels),
        while both networks work."""
        values = tokens * self.hidden_size * (self.sent_bytes + _BF16)
        inside = values * self.copies / self._link
        between = values * self.node_copies / self._network
        latency = self.assumed.network_latency if self.node_copies else self.assumed.link_latency
        return max(inside, between) + 2 * latency

    def _hand_on(self, tokens: float) -> float:
        """Each device sends its copy of the hidden states to one of the next stage."""
        size = tokens * self.hidden_size * _BF16
        if self.replica.devices > self.assumed.node_size:
            return size / self._network + self.assumed.network_latency
        return size / self._link + self.assumed.link_latency

    @property
    def _link(self) -> float:
        return self.gpu.link_bandwidth * self.assumed.link_efficiency

    @property
    def _network(self) -> float:
        return self.assumed.network_bandwidth * self.assumed.link_efficiency


def _others(places: int, choices: int) -> float:
    """How many of the places that are not the own one are hit by so many independent choices, in the mean."""
    return (places - 1) * (1 - (1 - 1 / places) ** choices)
