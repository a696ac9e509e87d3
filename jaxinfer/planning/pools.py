"""Prefill and decode on devices of their own: what a replica of either pool does."""

import math

from jaxinfer.planning.load import Load
from jaxinfer.planning.roofline import Work
from jaxinfer.planning.service import ReplicaModel, Service, waiting, with_prompt

BUSY = tuple(i / 50 for i in range(1, 50))
"""Shares of the time that a prefill replica works, that are tried."""


def serve_prefill(model: ReplicaModel, load: Load, busy: float, chunk: int) -> Service | None:
    """A replica that computes prompts and first tokens only, and sends K and V of what the prefix cache did not have.
    They are sent layer by layer while the next ones are computed, so the last layer's share comes on top of the time.

    Args:
        busy: share of the time that it works.
    """
    missing = max(1.0, load.prompt * (1 - model.techniques.prefix_hits))
    together = max(1.0, chunk / missing)
    fitting = model.most_sequences(load.prompt, chunk, 0.0)
    if fitting < together:
        return None
    step = model.period(with_prompt(Work(0.0), load, missing, chunk))
    chunks = max(1.0, missing / chunk)
    sent = transfer_seconds(model, missing)
    return Service(
        sequences=together,
        chunk=chunk,
        # No faster than the network carries away what is computed.
        rate=min(busy * chunk / missing / step, 1 / sent),
        ttft=waiting(busy) * chunks * step + math.ceil(chunks) * step + sent / model.parts.config.num_layers,
        tpot=0.0,
        gap=0.0,
        busy=busy,
        cache_tokens=fitting * load.prompt,
    )


def serve_decode(model: ReplicaModel, load: Load, sequences: float, chunk: int) -> Service | None:
    """A replica that gets its prompts computed.

    Args:
        chunk: 0, prompt tokens of a step.
    """
    techniques = model.techniques
    length = load.prompt + load.output / 2
    fitting = model.most_sequences(length, 1, sequences)
    if sequences > fitting:
        return None
    step = model.period(Work(sequences, techniques.tokens_per_step, length))
    return Service(
        sequences=sequences,
        chunk=chunk,
        rate=sequences * techniques.accepted / (load.output * step),
        ttft=0.0,
        tpot=step / techniques.accepted,
        gap=step,
        busy=0.0,
        cache_tokens=fitting / model.assumed.cache_occupancy * length,
    )


def transfer_seconds(model: ReplicaModel, tokens: float) -> float:
    """Seconds that K and V of so many tokens of one sequence are on the network; each device sends what it holds."""
    bandwidth = model.assumed.network_bandwidth * model.assumed.link_efficiency
    return max(stage.memory.cache_per_token for stage in model.stages) * tokens / bandwidth
