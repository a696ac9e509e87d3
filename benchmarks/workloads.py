"""The loads that benchmarks measure: token ids and lengths from fixed seeds."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One request: prompt ids, and how many tokens to generate (EOS is ignored)."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once.

    Attributes:
        unit: what the rate counts: generated or prompt tokens.
    """

    name: str
    jobs: list[Job]
    unit: str = "output tok/s"

    @property
    def tokens(self) -> int:
        if self.unit == "prompt tok/s":
            return sum(len(job.prompt) for job in self.jobs)
        return sum(job.max_tokens for job in self.jobs)


def prompt_ids(count: int, seed: int, low: int = 100, high: int = 49000) -> list[int]:
    """Random ids that are no special tokens; different seeds share no prefix, so caches do not help."""
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(count)]


def throughput(count: int, seed: int) -> Workload:
    """``count`` requests with prompts of 32 to 256 and outputs of 32 to 128 tokens; the lengths do not depend on the
    seed, the ids do."""
    rng = random.Random(0)
    shapes = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(count)]
    jobs = [Job(prompt_ids(p, 1000 * seed + i), n) for i, (p, n) in enumerate(shapes)]
    return Workload(f"{count} requests", jobs)


def single_stream(seed: int) -> Workload:
    """One request, 32 prompt tokens and 128 generated ones."""
    return Workload("single stream", [Job(prompt_ids(32, seed), 128)])


def prefill(seed: int) -> Workload:
    """One prompt of 1,024 tokens and one generated token."""
    return Workload("prefill 1024", [Job(prompt_ids(1024, seed), 1)], unit="prompt tok/s")


def workload(name: str, seed: int) -> Workload:
    """A workload by its name."""
    if name == "single stream":
        return single_stream(seed)
    if name == "prefill 1024":
        return prefill(seed)
    return throughput(int(name.split()[0]), seed)


NAMES = ("single stream", "prefill 1024", "32 requests", "64 requests")
