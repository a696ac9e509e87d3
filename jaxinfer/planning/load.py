"""What is asked of a deployment, and which techniques it uses."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxinfer.planning.described import WeightFormat

CacheFormat = Literal["bf16", "fp8"]
_NAMES = ("rate", "prompt", "output", "ttft", "tpot", "gap")


@dataclass(frozen=True)
class Load:
    """Requests, and how fast they are to be answered.

    Attributes:
        rate: requests per second of all replicas together, at the peak.
        prompt, output: mean tokens of a request.
        ttft: most seconds until the first token, in the mean.
        tpot: most seconds per token after that, in the mean.
        gap: most seconds between two tokens of a sequence, while prompts of others are computed.
    """

    rate: float
    prompt: float
    output: float
    ttft: float = math.inf
    tpot: float = math.inf
    gap: float = math.inf

    def __post_init__(self) -> None:
        for name in _NAMES:
            if not getattr(self, name) > 0:
                raise ValueError(f"load: {name} is {getattr(self, name)}, but must be positive")


@dataclass(frozen=True)
class Techniques:
    """What a deployment does to need fewer devices.

    Attributes:
        weights: how matrices and experts are held. Products with fp8 weights have fp8 activations too where the card
            has units for it; int4 weights are expanded to bf16.
        cache: how K and V are held.
        batching: ``continuous``: a sequence that ends is replaced at the next step. ``static``: a batch runs until its
            last sequence ends, in space for the longest output.
        prefix_hits: share of prompt tokens that the prefix cache has.
        drafts: drafted tokens of a sequence in a step, by a head of one layer.
        accepted: tokens that a step yields of a sequence, the one behind the drafts included; 1 without drafts.
        disaggregated: prompts are computed on devices of their own.
    """

    weights: WeightFormat = "bf16"
    cache: CacheFormat = "bf16"
    batching: Literal["continuous", "static"] = "continuous"
    prefix_hits: float = 0.0
    drafts: int = 0
    accepted: float = 1.0
    disaggregated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_hits < 1:
            raise ValueError(f"prefix hits are {self.prefix_hits}, but must be from 0 to less than 1")
        if self.drafts < 0 or not 1 <= self.accepted <= 1 + self.drafts:
            raise ValueError(
                f"{self.accepted} tokens a step with {self.drafts} drafts: from 1 to drafts + 1 = {self.drafts + 1}"
            )
        if self.disaggregated and self.batching == "static":
            raise ValueError("disaggregation goes with continuous batching only")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that are computed of a decoding sequence in a step."""
        return 1 + self.drafts


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "k": 1e3, "m": 1e6}


def parse_load(text: str) -> Load:
    """A load from "rate=1.4M, prompt=1500, output=300, ttft=1s, tpot=50ms"; suffixes are k and M, us, ms and s.

    Raises:
        ValueError: names what is wrong and what is allowed.
    """
    values = parse_values(text.split(","), "load")
    unknown = [name for name in values if name not in _NAMES]
    missing = [name for name in _NAMES[:3] if name not in values]
    if unknown or missing:
        raise ValueError(
            f"load: {'unknown' if unknown else 'missing'} {(unknown or missing)[0]!r}; it looks like "
            "'rate=100, prompt=1500, output=300, ttft=1s, tpot=50ms, gap=100ms', the last three may be left out"
        )
    return Load(**values)


def parse_values(items: Iterable[str], what: str) -> dict[str, float]:
    """Numbers by name, from texts such as "tpot=50ms".

    Raises:
        ValueError: a text has another form, or a name comes twice.
    """
    values: dict[str, float] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name, text = name.strip(), text.strip().lower()
        suffix = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
        try:
            value = float(text.removesuffix(suffix)) * _UNITS.get(suffix, 1.0)
        except ValueError:
            value = math.nan
        if not equals or math.isnan(value):
            raise ValueError(f"{what}: {item.strip()!r} is not NAME=NUMBER")
        if name in values:
            raise ValueError(f"{what}: {name!r} is there twice")
        values[name] = value
    return values
