"""A replica in steady state: how many requests a second it serves, and how fast, for a number of running sequences."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from jaxinfer.planning.assumptions import Assumptions
from jaxinfer.planning.footprint import temporary_bytes, usable_memory
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import Load, Techniques
from jaxinfer.planning.parts import ModelParts
from jaxinfer.planning.roofline import StageModel, Work, stage_models
from pallas_kernels.gpus import Gpu

BLOCK_SIZE = 16
"""Tokens of a KV block, the default of ``cache.block_size``."""

CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Prompt tokens of a step that are tried."""

_GROWTH = 1.06
MAX_SEQUENCES = 4096
"""The largest ``scheduler.max_num_seqs``: sequences of one scheduler."""


@dataclass(frozen=True)
class Service:
    """What a replica does.

    Attributes:
        sequences: that run at the same time; ``chunk``: prompt tokens of a step.
        rate: requests per second.
        ttft, tpot: seconds, in the mean, without the time that requests wait for other replicas to be full.
        gap: seconds of a step that carries prompts.
        busy: share of the steps that carry prompts.
        cache_tokens: tokens that the KV cache of the replica holds, at the mean length of a sequence.
    """

    sequences: float
    chunk: int
    rate: float
    ttft: float
    tpot: float
    gap: float
    busy: float
    cache_tokens: float

    def meets(self, load: Load) -> bool:
        return self.ttft <= load.ttft and self.tpot <= load.tpot and self.gap <= load.gap


@dataclass(frozen=True)
class ReplicaModel:
    """A replica of a model on cards, ready to be asked what it can serve."""

    parts: ModelParts
    replica: Replica
    gpu: Gpu
    techniques: Techniques
    assumed: Assumptions
    stages: tuple[StageModel, ...]

    @classmethod
    def make(
        cls, parts: ModelParts, replica: Replica, gpu: Gpu, techniques: Techniques, assumed: Assumptions
    ) -> "ReplicaModel":
        """Raises:
        ValueError: the devices cannot share the model.
        """
        stages = stage_models(parts, replica, gpu, techniques, assumed)
        return cls(parts, replica, gpu, techniques, assumed, stages)

    def period(self, work: Work) -> float:
        """Seconds from one token of a sequence to its next: all stages work, each on a batch of its own."""
        stages = len(self.stages)
        own = work.share(stages)
        device = max(stage.step(own).total for stage in self.stages) + self._drafting(own)
        # Devices with sequences of their own would have a scheduler each, as nobody else needs to know of them.
        scheduled = own.sequences / self.replica.sequence_shares
        host = self.assumed.host_per_step + self.assumed.host_per_sequence * scheduled
        return stages * max(device, host)

    def _drafting(self, work: Work) -> float:
        """A draft head is as large as a layer and the head of the model, and proposes one token after the other."""
        if not self.techniques.drafts or not work.sequences:
            return 0.0
        last = self.stages[-1]
        step = last.step(Work(work.sequences, 1, work.context))
        layers = (step.total - step.head) / last.layers
        return self.techniques.drafts * (layers + step.head)

    def free_memory(self, tokens: float, rows: float) -> list[float]:
        """Bytes of a device of each stage that the cache can have; negative if weights and temporaries do not fit."""
        shares = self.replica.sequence_shares * len(self.stages)
        used = temporary_bytes(self.parts.config, self.replica, tokens / shares, rows / shares)
        usable = usable_memory(self.gpu.memory_bytes)
        return [usable - stage.memory.weights - used for stage in self.stages]

    def most_sequences(self, length: float, chunk: int, sequences: float) -> float:
        """Sequences of so many tokens whose blocks fit beside a step of ``sequences`` and a chunk."""
        free = self.free_memory(sequences * self.techniques.tokens_per_step + chunk, sequences)
        each = [stage.memory.sequence_bytes(length, chunk, BLOCK_SIZE) for stage in self.stages]
        fitting = min(f / e for f, e in zip(free, each)) * self.replica.sequence_shares
        return max(0.0, fitting * self.assumed.cache_occupancy)


Serve = Callable[[ReplicaModel, Load, float, int], Service | None]
"""What a replica does with so many sequences and such chunks; None if that is impossible."""


@cache
def batches(limit: int) -> tuple[float, ...]:
    """Numbers of sequences worth trying: whole ones, each some percent more than the one before."""
    sizes = [1]
    while sizes[-1] < limit:
        sizes.append(min(limit, max(sizes[-1] + 1, math.ceil(sizes[-1] * _GROWTH))))
    return tuple(map(float, sizes))


def serve(model: ReplicaModel, load: Load, sequences: float, chunk: int) -> Service | None:
    """A replica that computes prompts and outputs."""
    how = _static if model.techniques.batching == "static" else _continuous
    return how(model, load, sequences, chunk)


def best_service(
    model: ReplicaModel, load: Load, serve: Serve, sizes: Sequence[float], chunks: Sequence[int]
) -> Service | None:
    """The service within the limits of the load with the highest rate; None if there is none.

    More sequences give a higher rate, and are slower for each, so the most that meet the limits are found by bisection.
    """
    found = []
    for chunk in chunks:

        def too_many(sequences: float, chunk: int = chunk) -> bool:
            service = serve(model, load, sequences, chunk)
            return service is None or not service.meets(load)

        count = bisect_left(sizes, True, key=too_many)
        if count:
            found.append(serve(model, load, sizes[count - 1], chunk))
    return max(filter(None, found), key=lambda service: service.rate, default=None)


def _continuous(model: ReplicaModel, load: Load, sequences: float, chunk: int) -> Service | None:
    """Each step computes a token of every sequence (or ``accepted`` of them with drafts), and, in a share ``busy`` of
    the steps, a chunk of prompts: as many prompt tokens as belong to the requests that end meanwhile."""
    techniques = model.techniques
    fitting = model.most_sequences(load.prompt + load.output / 2, chunk, sequences)
    if sequences > fitting:
        return None
    missing = max(1.0, load.prompt * (1 - techniques.prefix_hits))
    decode = Work(sequences, techniques.tokens_per_step, load.prompt + load.output / 2)
    mixed = with_prompt(decode, load, missing, chunk)
    # Tokens of prompts that a step computes in the mean, so that as many requests start as end.
    needed = missing * sequences * techniques.accepted / load.output
    busy = needed / chunk
    if busy >= 1:
        return None
    slow, quick = model.period(mixed), model.period(decode)
    step = busy * slow + (1 - busy) * quick
    chunks = max(1.0, missing / chunk)
    return Service(
        sequences=sequences,
        chunk=chunk,
        rate=sequences * techniques.accepted / (load.output * step),
        ttft=quick / 2 + waiting(busy) * chunks * slow + math.ceil(chunks) * slow,
        tpot=step / techniques.accepted,
        gap=slow,
        busy=busy,
        cache_tokens=fitting / model.assumed.cache_occupancy * (load.prompt + load.output / 2),
    )


def _static(model: ReplicaModel, load: Load, sequences: float, chunk: int) -> Service | None:
    """Batches that start and end together. The longest of n outputs with exponential lengths has 1 + 1/2 + ... + 1/n
    times the mean."""
    techniques, assumed = model.techniques, model.assumed
    longest = load.output * min(assumed.longest_output, math.log(sequences) + 0.5772 + 0.5 / sequences)
    longest = max(longest, load.output)
    # Space is kept for the longest output that may come.
    length = load.prompt + load.output * assumed.longest_output
    fitting = model.most_sequences(length, chunk, sequences)
    if sequences > fitting:
        return None
    missing = max(1.0, load.prompt * (1 - techniques.prefix_hits))
    prefill = math.ceil(sequences * missing / chunk) * model.period(
        with_prompt(Work(0.0), load, missing, chunk)
    )
    step = model.period(Work(sequences, techniques.tokens_per_step, load.prompt + load.output / 2))
    duration = prefill + longest / techniques.accepted * step
    rate = sequences / duration
    replicas = max(1.0, load.rate / rate)
    return Service(
        sequences=sequences,
        chunk=chunk,
        rate=rate,
        # A batch that has started takes nobody; the next replica to end is one of many.
        ttft=duration / (2 * replicas) + prefill,
        tpot=step / techniques.accepted,
        gap=step,
        busy=prefill / duration,
        cache_tokens=fitting / assumed.cache_occupancy * length,
    )


def with_prompt(work: Work, load: Load, missing: float, chunk: int) -> Work:
    """The work with a chunk of prompts, whose tokens attend to the prefix that was there and half of what was not."""
    context = load.prompt - missing / 2
    return replace(work, prompt=chunk, prompt_context=context, prompt_sequences=max(1.0, chunk / missing))


def waiting(busy: float) -> float:
    """Mean time that a request waits for those before it, in times of service: M/D/1 (Pollaczek-Khinchine)."""
    return busy / (2 * (1 - busy)) if busy < 1 else math.inf
