"""The tables and the plot of docs/scaling.md: ``python -m benchmarks.scaling``.

Everything comes from the planner (``jaxinfer plan --load``); published figures are in ``scaling_published.json``.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.planning.assumptions import SOURCES, Assumptions
from jaxinfer.planning.described import describe
from jaxinfer.planning.layouts import Replica
from jaxinfer.planning.load import Load, Techniques
from jaxinfer.planning.parts import ModelParts, model_parts
from jaxinfer.planning.pools import BUSY, serve_decode, serve_prefill
from jaxinfer.planning.search import NoPlanError, Plan, make_plan
from jaxinfer.planning.service import CHUNKS, MAX_SEQUENCES, ReplicaModel, batches, best_service
from jaxinfer.planning.techniques import variations
from pallas_kernels.gpus import CARDS

ROOT = Path(__file__).parents[1]
DOCUMENT, IMAGE = ROOT / "docs/scaling.md", ROOT / "docs/images/scaling.png"
MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "deepseek-v3")
LOAD = Load(rate=1.4e6, prompt=1500, output=300, ttft=1.0, tpot=0.05, gap=0.1)
NOTHING = Techniques(batching="static")
ALL = Techniques("fp8", "fp8", prefix_hits=0.5, drafts=3, accepted=2.2, disaggregated=True)
LIMITS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1)
ASSUMED = Assumptions()
LAYOUT_HEAD = (
    "model",
    "card",
    "weights, KV",
    "layout",
    "weights, GiB",
    "KV, KiB a token",
    "KV capacity, 1000 tokens",
    "sequences + prompt tokens of a step",
    "TTFT, ms",
    "TPOT, ms",
    "tokens/s per GPU",
    "GPUs",
)
PUBLISHED_HEAD = (
    "model",
    "card",
    "layout",
    "prompt / output",
    "published, tokens/s per GPU",
    "planner",
    "ratio",
    "source",
)
_GIB = 1 << 30


def parts_of(name: str) -> ModelParts:
    return model_parts(describe(name).config)


def plan(name: str, gpu: str, techniques: Techniques, load: Load = LOAD) -> Plan | None:
    """None if nothing serves the load."""
    try:
        return make_plan(parts_of(name), CARDS[gpu], load, techniques, ASSUMED)
    except NoPlanError:
        return None


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def layout_rows() -> Iterator[Sequence[str]]:
    """Per model, card and format: the best layout, its memory and its speed, for a thousandth of the load."""
    load = replace(LOAD, rate=LOAD.rate / 1000)
    for name in MODELS:
        for gpu in ("h100", "h200"):
            for weights, cache in (("bf16", "bf16"), ("fp8", "fp8")):
                found = plan(name, gpu, Techniques(weights, cache), load)  # type: ignore[arg-type]
                start = (name, gpu, weights)
                if found is None:
                    yield (*start, "none", *[""] * 8)
                    continue
                (pool,) = found.pools
                memory = pool.model.stages[0].memory
                yield (
                    *start,
                    pool.model.replica.label,
                    f"{memory.weights / _GIB:.1f}",
                    f"{memory.cache_per_token / 1024:.1f}",
                    f"{pool.service.cache_tokens / 1000:,.0f}",
                    f"{pool.service.sequences:.0f} + {pool.service.chunk}",
                    f"{found.ttft * 1e3:.0f}",
                    f"{found.tpot * 1e3:.1f}",
                    f"{found.tokens_per_device:,.0f}",
                    f"{found.devices:,}",
                )


def million_rows(plans: dict[str, dict[str, Plan | None]]) -> Iterator[Sequence[str]]:
    for technique in plans[MODELS[0]]:
        found = [plans[name][technique] for name in MODELS]
        yield (technique, *("none" if p is None else f"{p.devices:,}" for p in found))


def published_rows(document: dict[str, Any]) -> Iterator[Sequence[str]]:
    for row in document["rows"]:
        expected = predict(row)
        layout = replica_of(row)
        yield (
            row["model"],
            row["gpu"],
            layout.label,
            f"{row['prompt']:,} / {row['output']:,}" + (f", {row['pool']}" if "pool" in row else ""),
            f"{row['per_gpu']:,}",
            f"{expected:,.0f}",
            f"{expected / row['per_gpu']:.2f}",
            row["source"],
        )


def replica_of(row: dict[str, Any]) -> Replica:
    attention: Any = "data" if row.get("by_data") else "shared"
    return Replica(row.get("tensor", 1), row.get("expert", 1), attention=attention)


def predict(row: dict[str, Any]) -> float:
    """Output tokens per second and device at most; of a prefill pool prompt tokens."""
    techniques = Techniques("fp8", row.get("cache", "fp8"))
    load = Load(1.0, row["prompt"], row["output"], **({"tpot": row["tpot"]} if "tpot" in row else {}))
    parts, gpu, replica = parts_of(row["model"]), CARDS[row["gpu"]], replica_of(row)
    if "pool" not in row:
        return make_plan(parts, gpu, load, techniques, ASSUMED, replica=replica).tokens_per_device
    model = ReplicaModel.make(parts, replica, gpu, techniques, ASSUMED)
    if row["pool"] == "prefill":
        # Chunks are those of a device there.
        chunks = tuple(chunk * replica.sequence_shares for chunk in CHUNKS)
        service = best_service(model, load, serve_prefill, BUSY, chunks)
        tokens = row["prompt"]
    else:
        sizes = batches(MAX_SEQUENCES * replica.sequence_shares)
        service = best_service(model, load, serve_decode, sizes, (0,))
        tokens = row["output"]
    assert service is not None
    return service.rate * tokens / replica.devices


def assumption_rows() -> Iterator[Sequence[str]]:
    for name, source in SOURCES.items():
        yield (f"`{name}`", f"{getattr(ASSUMED, name):g}", source)


def layouts() -> str:
    return table(LAYOUT_HEAD, layout_rows())


def million() -> str:
    """Draws the plot, too."""
    plans = {
        name: {label: plan(name, "h200", used) for label, used in variations(ALL, NOTHING)} for name in MODELS
    }
    draw(plans)
    return table(("techniques", *MODELS), million_rows(plans))


def published() -> str:
    document = json.loads((ROOT / "benchmarks/scaling_published.json").read_text())
    sources = "\n".join(f"- `{name}`: {text}" for name, text in document["sources"].items())
    return table(PUBLISHED_HEAD, published_rows(document)) + f"\n\n{sources}"


def assumptions() -> str:
    return table(("assumption", "value", "what, and where it comes from"), assumption_rows())


SECTIONS: dict[str, Callable[[], str]] = {
    "assumptions": assumptions,
    "published": published,
    "layouts": layouts,
    "million": million,
}


def draw(plans: dict[str, dict[str, Plan | None]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    one_pool = replace(ALL, disaggregated=False)
    kept = [label for label in plans[MODELS[0]] if not label.startswith("all but")]
    width = 0.8 / len(MODELS)
    for number, name in enumerate(MODELS):
        found = [(limit, plan(name, "h200", one_pool, replace(LOAD, tpot=limit))) for limit in LIMITS]
        points = [(limit * 1e3, p.tokens_per_device) for limit, p in found if p is not None]
        left.plot(*zip(*points), marker="o", label=name)
        # No bar where nothing serves the load.
        bars = [(i, p.devices) for i, label in enumerate(kept) if (p := plans[name][label]) is not None]
        places = [i + (number - (len(MODELS) - 1) / 2) * width for i, _ in bars]
        right.bar(places, [devices for _, devices in bars], width, label=name)
    left.set(xlabel="limit of TPOT, ms", ylabel="output tokens/s per GPU", xscale="log", yscale="log")
    left.set_title("H200, fp8, half of the prompts cached, speculation, one pool")
    right.set_xticks(range(len(kept)), kept, rotation=30, ha="right")
    right.set(ylabel="H200s", yscale="log")
    right.set_title("1.4 M requests/s: nothing, each technique alone, all")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both", axis="both" if axes is left else "y")
        axes.set_axisbelow(True)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=100)


def write(path: Path, texts: dict[str, str]) -> None:
    """Replaces what lies between the markers of each section.

    Raises:
        ValueError: the document lacks markers.
    """
    text = path.read_text()
    for name, content in texts.items():
        pattern = re.compile(f"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{path}: no markers for {name!r}")
        text = pattern.sub(lambda match, content=content: match[1] + content + "\n" + match[2], text)  # type: ignore[misc]
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--only", choices=tuple(SECTIONS), action="append", help="Repeatable; default: all.")
    options = parser.parse_args()
    write(options.document, {name: SECTIONS[name]() for name in options.only or SECTIONS})


if __name__ == "__main__":
    main()
