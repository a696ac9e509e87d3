"""When requests arrive: an open loop does not wait for answers, so a slow server sees a queue, as in production."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class RampUp:
    """The rate moves from ``start`` to ``end`` requests per second over the load."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf or not 0 < self.end < math.inf:
            raise ValueError(f"ramp-up rates must be positive and finite (given: {self.start}, {self.end})")

    def rates(self, count: int) -> np.ndarray:
        """Requests per second in force at each request, ``[count]``."""
        part = np.linspace(0.0, 1.0, count)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * part
        return self.start * (self.end / self.start) ** part


def arrival_times(
    count: int, rate: float, burstiness: float = 1.0, seed: int = 0, ramp: RampUp | None = None
) -> np.ndarray:
    """Seconds after the start, ascending, the first at 0.

    The gaps have a gamma distribution of mean 1 / rate and shape ``burstiness``: 1 is a Poisson process, less comes in
    bursts (coefficient of variation ``burstiness ** -0.5``), ``inf`` is constant.

    Args:
        rate: requests per second; ``inf``: all at once. Of no effect with ``ramp``.

    Returns:
        ``[count]``.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"request rate and burstiness must be positive (given: {rate}, {burstiness})")
    if ramp is None and math.isinf(rate):
        return np.zeros(count)
    rates = np.full(count, rate) if ramp is None else ramp.rates(count)
    units = np.ones(count)
    if math.isfinite(burstiness):
        units = np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, count)
    gaps = units / rates
    gaps[:1] = 0.0
    return np.cumsum(gaps)
