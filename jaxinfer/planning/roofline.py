"""How long a step takes: operations, bytes of memory and bytes between devices, each at the speed of its hardware.

Method: Williams, Waterman and Patterson, "Roofline" (2009), for each kind of work of a layer; kinds follow each other,
so their times add up. No kernel is modelled: what a real one loses is in ``Assumptions``.
"""

from dataclasses import dataclass

from jaxinfer.models.config import TransformerConfig
from jaxinfer.planning.assumptions import Assumptions
from jaxinfer.planning.exchange import Exchange
from jaxinfer.planning.footprint import StageMemory, stage_memories
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import Techniques
from jaxinfer.planning.parts import ModelParts, Role
from pallas_kernels.gpus import Gpu


@dataclass(frozen=True)
class Work:
    """A step of a replica.

    Attributes:
        sequences: that decode.
        tokens_each: computed of each of them.
        context: mean tokens that they have.
        prompt: tokens of prompts.
        prompt_context: mean tokens that a token of a prompt attends to.
        prompt_sequences: that these tokens belong to.
    """

    sequences: float
    tokens_each: int = 1
    context: float = 0.0
    prompt: float = 0.0
    prompt_context: float = 0.0
    prompt_sequences: float = 1.0

    @property
    def tokens(self) -> float:
        return self.sequences * self.tokens_each + self.prompt

    def share(self, parts: int) -> "Work":
        """What one of so many devices, or batches, has of it."""
        return Work(
            self.sequences / parts,
            self.tokens_each,
            self.context,
            self.prompt / parts,
            self.prompt_context,
            self.prompt_sequences / parts,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one stage, by what takes them."""

    matrices: float
    experts: float
    attention: float
    head: float
    exchange: float
    launches: float

    @property
    def total(self) -> float:
        return self.matrices + self.experts + self.attention + self.head + self.exchange + self.launches


@dataclass(frozen=True)
class StageModel:
    """One device of a stage, ready to be asked for times.

    Attributes:
        elements, held: parameters and bytes on the device, by role.
        attention_flops: operations of one token for each token that it attends to, over all layers of the stage without
            windows; ``windowed_flops``: those of layers with a window, with the window.
        last: whether the stage has the head.
    """

    config: TransformerConfig
    gpu: Gpu
    replica: Replica
    assumed: Assumptions
    techniques: Techniques
    memory: StageMemory
    exchange: Exchange
    elements: dict[Role, float]
    held: dict[Role, float]
    layers: int
    attention_flops: float
    windowed_flops: tuple[tuple[int, float], ...]
    last: bool

    def step(self, work: Work) -> StepTime:
        """Time of a step whose work is that of the whole stage."""
        own = work.share(self.replica.sequence_shares)
        return StepTime(
            matrices=self._product("matrix", own.tokens, 1.0, 1.0),
            experts=self._experts(work.tokens),
            attention=self._attention(own),
            head=self._head(own.sequences * own.tokens_each + own.prompt_sequences) if self.last else 0.0,
            exchange=self.exchange.seconds(own.tokens),
            launches=self.layers * self.assumed.kernels_per_layer * self.assumed.kernel_gap,
        )

    def _product(self, role: Role, tokens: float, active: float, touched: float) -> float:
        """Args:
        active: share of the parameters that a token is multiplied by.
        touched: share that is read.
        """
        flops = 2 * self.elements.get(role, 0.0) * tokens * active
        return max(
            flops / (self._peak(role) * self.assumed.compute_efficiency),
            self.held.get(role, 0.0) * touched / self._bandwidth,
        )

    def _experts(self, tokens: float) -> float:
        """Routing is taken to be even and independent, but for the load of the busiest device."""
        moe = self.config.moe
        if moe is None:
            return 0.0
        active = moe.experts_per_token / moe.num_experts
        uneven = self.assumed.expert_imbalance if self.replica.expert > 1 else 1.0
        return self._product(
            "experts", tokens, active * uneven, min(1.0, (1 - (1 - active) ** tokens) * uneven)
        )

    def _head(self, rows: float) -> float:
        """Logits are written once and read twice, in float32, to draw from them."""
        logits = 12 * rows * self.config.vocab_size / self.replica.rules.size("vocab")
        return self._product("head", rows, 1.0, 1.0) + logits / self._bandwidth

    def _attention(self, work: Work) -> float:
        decode, prompt = work.sequences * work.tokens_each, work.prompt
        read = sum(g.bytes_read(work.context) for g in self.memory.groups) * work.sequences
        read_once = sum(g.bytes_read(work.prompt_context) for g in self.memory.groups) * work.prompt_sequences
        peak = self.gpu.tflops["bf16"] * 1e12
        rate = peak * self.assumed.attention_efficiency
        return max(read / self._bandwidth, decode * self._flops(work.context) / rate) + max(
            (read_once if prompt else 0.0) / self._bandwidth, prompt * self._flops(work.prompt_context) / rate
        )

    def _flops(self, context: float) -> float:
        windowed = sum(min(context, window) * flops for window, flops in self.windowed_flops)
        return context * self.attention_flops + windowed

    def _peak(self, role: Role) -> float:
        quantized = self.techniques.weights == "fp8" and role in ("matrix", "experts")
        kind = "fp8" if quantized and "fp8" in self.gpu.tflops else "bf16"
        return self.gpu.tflops[kind] * 1e12

    @property
    def _bandwidth(self) -> float:
        return self.gpu.memory_bandwidth * self.assumed.memory_efficiency


def stage_models(
    parts: ModelParts, replica: Replica, gpu: Gpu, techniques: Techniques, assumed: Assumptions
) -> tuple[StageModel, ...]:
    """One model for each stage.

    Raises:
        ValueError: the devices cannot share the model.
    """
    config, rules = parts.config, replica.rules
    memories = stage_memories(parts, replica, techniques.weights, techniques.cache)
    models = []
    for memory, (first, stop) in zip(memories, replica.stages(config.num_layers)):
        elements: dict[Role, float] = {}
        held: dict[Role, float] = {}
        last = stop == config.num_layers
        for count, p in parts.stage(first, stop):
            # A tied embedding is read whole by the head.
            role: Role = "head" if p.role == "embedding" and last and p in parts.head else p.role
            elements[role] = elements.get(role, 0.0) + count * p.local_size(rules)
            held[role] = held.get(role, 0.0) + count * p.local_bytes(rules, techniques.weights)
        per_layer = _attention_flops(config, rules.local("heads", config.num_heads))
        windows = [window for window in config.windows[first:stop] if window is not None]
        models.append(
            StageModel(
                config=config,
                gpu=gpu,
                replica=replica,
                assumed=assumed,
                techniques=techniques,
                memory=memory,
                exchange=Exchange.of_stage(config, replica, gpu, assumed, techniques, first, stop),
                elements=elements,
                held=held,
                layers=stop - first,
                attention_flops=per_layer * (stop - first - len(windows)),
                windowed_flops=tuple((w, per_layer * windows.count(w)) for w in sorted(set(windows))),
                last=last,
            )
        )
    return tuple(models)


def _attention_flops(config: TransformerConfig, heads: int) -> float:
    """Operations of one token for one token that it attends to, in one layer: scores, and the sum of values."""
    if config.latent is not None:
        return 2.0 * heads * (2 * config.latent.rank + config.latent.rope_dim)
    return 4.0 * heads * config.head_dim
