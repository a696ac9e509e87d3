"""What ``jaxinfer plan --load`` was asked, as values."""

from dataclasses import dataclass
from pathlib import Path

from jaxinfer.planning.assumptions import Assumptions, assume
from jaxinfer.planning.described import Described, describe
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import Load, Techniques, parse_load, parse_values
from jaxinfer.planning.parts import ModelParts, model_parts
from jaxinfer.planning.search import Plan, make_plan
from jaxinfer.planning.techniques import parse_techniques
from pallas_kernels.gpus import CARDS, Gpu

_LAYOUT = ("tensor", "expert", "pipeline")


@dataclass(frozen=True)
class Question:
    """Everything that a plan depends on.

    Attributes:
        replica: a layout that is given; None: search.
        by_data: search layouts whose devices have sequences of their own.
    """

    model: Described
    parts: ModelParts
    gpu: Gpu
    load: Load
    techniques: Techniques
    assumed: Assumptions
    replica: Replica | None
    by_data: bool

    def answer(self, techniques: Techniques | None = None, load: Load | None = None) -> Plan:
        """The plan, or that of other techniques or another load."""
        return make_plan(
            self.parts,
            self.gpu,
            load or self.load,
            techniques or self.techniques,
            self.assumed,
            self.replica,
            "data" if self.by_data else "shared",
        )


@dataclass(frozen=True)
class Options:
    """The options as text; see ``serve.cli.plan``."""

    model: str
    gpu: str
    load: str
    use: str = ""
    layout: str = ""
    assume: str = ""
    by_data: bool = False
    sweep: Path | None = None
    compare: bool = False
    as_json: bool = False

    def question(self) -> Question:
        """Raises:
        CheckpointError, ValueError: something cannot be found, or is not allowed.
        """
        if self.gpu.lower() not in CARDS:
            raise ValueError(f"unknown GPU {self.gpu!r}; allowed: {', '.join(CARDS)}")
        load, techniques = parse_load(self.load), parse_techniques(self.use)
        assumed = assume(parse_values(filter(None, self.assume.split(",")), "assumptions"))
        replica = _replica(self.layout, self.by_data) if self.layout else None
        model = describe(self.model)
        return Question(
            model,
            model_parts(model.config),
            CARDS[self.gpu.lower()],
            load,
            techniques,
            assumed,
            replica,
            self.by_data,
        )


def _replica(text: str, by_data: bool) -> Replica:
    sizes = parse_values(text.split(","), "layout")
    for name, size in sizes.items():
        if name not in _LAYOUT or size < 1 or size != int(size):
            raise ValueError(
                f"layout: {name}={size:g} is not allowed; it looks like 'tensor=8, pipeline=2', names are "
                f"{', '.join(_LAYOUT)}, sizes whole numbers from 1"
            )
    whole = {name: int(size) for name, size in sizes.items()}
    if by_data and (whole.get("tensor", 1) > 1 or whole.get("pipeline", 1) > 1):
        raise ValueError("layout: with attention by data only expert may be more than 1")
    return Replica(**whole, attention="data" if by_data else "shared")
