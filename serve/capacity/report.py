"""A plan as tables, and as JSON."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.planning.assumptions import SOURCES
from jaxinfer.planning.footprint import temporary_bytes, usable_memory
from jaxinfer.planning.load import Techniques
from jaxinfer.planning.roofline import Work
from jaxinfer.planning.search import NoPlanError, Plan, Pool
from jaxinfer.planning.service import with_prompt
from jaxinfer.planning.techniques import variations
from serve.capacity.request import Options, Question

_GIB = 1 << 30
NOTES = (
    "On several devices this engine holds weights in bfloat16, whatever the checkpoint has; fp8 and int4 weights say "
    "what it would take with them (docs/scaling.md).",
    "Means, not percentiles: nothing is known of bursts, of lengths that differ, or of failures.",
)


def run(options: Options) -> None:
    """Answers, in the form that was asked for."""
    question = options.question()
    plan = question.answer()
    if options.sweep is not None:
        from serve.capacity.sweep import plot

        plot(question, options.sweep)
        print(f"wrote {options.sweep}", file=sys.stderr)
    compared = _compared(question) if options.compare else []
    if options.as_json:
        print(json.dumps(as_json(question, plan, compared), indent=2))
        return
    console = Console()
    console.print(_answer(question, plan))
    for pool in plan.pools:
        console.print(_memory(question, pool))
        console.print(_times(question, pool))
    if compared:
        table = Table("techniques", "GPUs", "layout", "tokens/s per GPU", title="with and without")
        for name, found in compared:
            cells = ("none is fast enough",) if found is None else _cells(found)
            table.add_row(name, *cells)
        console.print(table)
    console.print(_assumptions(question))
    for note in NOTES:
        console.print(f"- {note}")


def _compared(question: Question) -> list[tuple[str, Plan | None]]:
    found: list[tuple[str, Plan | None]] = []
    for name, techniques in variations(question.techniques, Techniques(batching="static")):
        try:
            found.append((name, question.answer(techniques)))
        except NoPlanError:
            found.append((name, None))
    return found


def _cells(plan: Plan) -> tuple[str, str, str]:
    layouts = " + ".join(pool.model.replica.label for pool in plan.pools)
    return f"{plan.devices:,}", layouts, f"{plan.tokens_per_device:,.0f}"


def _answer(question: Question, plan: Plan) -> Table:
    load = question.load
    title = (
        f"{question.model.name} on {question.gpu.name}: {plan.devices:,} GPUs for {load.rate:,g} requests/s"
    )
    table = Table("", *(pool.purpose for pool in plan.pools), title=title)
    rows: dict[str, list[str]] = {
        "layout of a replica": [pool.model.replica.label for pool in plan.pools],
        "replicas (data parallel)": [f"{pool.replicas:,}" for pool in plan.pools],
        "GPUs": [f"{pool.devices:,}" for pool in plan.pools],
        "requests/s of a replica": [f"{pool.service.rate:.3g}" for pool in plan.pools],
        "sequences, prompt tokens of a step": [
            f"{pool.service.sequences:.0f}, {pool.service.chunk}" for pool in plan.pools
        ],
        "KV capacity of a replica, tokens": [f"{pool.service.cache_tokens:,.0f}" for pool in plan.pools],
        "steps with prompts": [f"{pool.service.busy:.0%}" for pool in plan.pools],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table.add_row("TTFT, mean (limit)", f"{_ms(plan.ttft)} ({_ms(load.ttft)})")
    table.add_row("TPOT, mean (limit)", f"{_ms(plan.tpot)} ({_ms(load.tpot)})")
    table.add_row("longest gap (limit)", f"{_ms(plan.gap)} ({_ms(load.gap)})")
    table.add_row("output tokens/s per GPU", f"{plan.tokens_per_device:,.0f}")
    table.add_row("model", f"{question.parts.num_parameters / 1e9:.1f} B parameters; {question.model.source}")
    table.add_row("serve with", *(_command(question, pool) for pool in plan.pools))
    return table


def _command(question: Question, pool: Pool) -> str:
    replica = pool.model.replica
    if replica.attention == "data":
        return "not a layout of this engine"
    sizes = {"tensor": replica.tensor, "expert": replica.expert, "pipeline": replica.pipeline}
    flags = [f"--parallel.{name} {size}" for name, size in sizes.items() if size > 1]
    if replica.devices > question.assumed.node_size:
        flags.append(f"--hosts.count {math.ceil(replica.devices / question.assumed.node_size)}")
    if pool.purpose != "all":
        flags.append(f"--disaggregation.role {pool.purpose}")
    sequences = math.ceil(pool.service.sequences)
    tokens = max(pool.service.chunk, 1) + sequences * question.techniques.tokens_per_step
    if question.techniques.drafts and replica.devices > 1:
        return "not by this engine: draft models and heads need one device"
    return " ".join(
        [*flags, f"--scheduler.max-num-seqs {sequences}", f"--scheduler.max-num-batched-tokens {tokens}"]
    )


def memory(pool: Pool) -> dict[str, float]:
    """Bytes of the fullest device of a replica."""
    model, service = pool.model, pool.service
    shares = model.replica.sequence_shares * len(model.stages)
    rows = service.sequences / shares
    tokens = rows * model.techniques.tokens_per_step + service.chunk / shares
    stage = max(model.stages, key=lambda s: s.memory.weights)
    used = temporary_bytes(model.parts.config, model.replica, tokens, rows)
    usable = usable_memory(model.gpu.memory_bytes)
    return {
        "weights": stage.memory.weights,
        "temporaries": used,
        "cache": usable - stage.memory.weights - used,
        "margin": model.gpu.memory_bytes - usable,
        "cache_per_token": stage.memory.cache_per_token,
    }


def _memory(question: Question, pool: Pool) -> Table:
    held = memory(pool)
    table = Table("memory of a device", "GiB", "notes", title=f"pool: {pool.purpose}")
    techniques = question.techniques
    table.add_row("weights", _gib(held["weights"]), f"matrices and experts in {techniques.weights}")
    groups = (group for stage in pool.model.stages for group in stage.memory.groups)
    windows = {group.window for group in groups if group.window is not None}
    note = f"{held['cache_per_token'] / 1024:.1f} KiB a token in {techniques.cache}"
    table.add_row("KV cache", _gib(held["cache"]), note + (f", windows {sorted(windows)}" if windows else ""))
    table.add_row("temporaries", _gib(held["temporaries"]), "of the largest step, estimated")
    table.add_row("kept free", _gib(held["margin"]), "jaxinfer/engine/memory.py: MARGIN")
    return table


def _times(question: Question, pool: Pool) -> Table:
    load, techniques, service = question.load, question.techniques, pool.service
    shares = len(pool.model.stages)
    missing = max(1.0, load.prompt * (1 - techniques.prefix_hits))
    running = 0.0 if pool.purpose == "prefill" else service.sequences
    decode = Work(running, techniques.tokens_per_step, load.prompt + load.output / 2)
    works = {"decode": decode.share(shares)} if running else {}
    if service.chunk:
        works["with prompts"] = with_prompt(decode, load, missing, service.chunk).share(shares)
    table = Table("step, ms on one stage", *works)
    times = [pool.model.stages[-1].step(work) for work in works.values()]
    for field in dataclasses.fields(times[0]):
        table.add_row(field.name, *(f"{getattr(time, field.name) * 1e3:.2f}" for time in times))
    table.add_row("total", *(f"{time.total * 1e3:.2f}" for time in times))
    return table


def _assumptions(question: Question) -> Table:
    table = Table("assumption", "value", "what, and where it comes from")
    gpu = question.gpu
    peak = ", ".join(
        f"{gpu.tflops[kind]:,.0f} TFLOP/s {kind}" for kind in ("bf16", "fp8") if kind in gpu.tflops
    )
    facts = (
        f"{gpu.memory_bandwidth / 1e12:.3g} TB/s, {peak}, {gpu.link_bandwidth / 1e9:.0f} GB/s to each side"
    )
    table.add_row("card", gpu.name, f"{facts}; data sheets (pallas_kernels/gpus.py)")
    for field in dataclasses.fields(question.assumed):
        table.add_row(field.name, f"{getattr(question.assumed, field.name):g}", SOURCES[field.name])
    return table


def as_json(question: Question, plan: Plan, compared: list[tuple[str, Plan | None]]) -> Mapping[str, Any]:
    """All that the tables say; seconds, bytes and counts. Limits that were not given are null."""
    return {
        "model": {"name": question.model.name, "source": question.model.source},
        "parameters": question.parts.num_parameters,
        "gpu": question.gpu.name,
        "load": {name: _finite(value) for name, value in dataclasses.asdict(question.load).items()},
        "techniques": dataclasses.asdict(question.techniques),
        "assumptions": {
            name: {"value": value, "source": SOURCES[name]}
            for name, value in dataclasses.asdict(question.assumed).items()
        },
        "devices": plan.devices,
        "ttft": plan.ttft,
        "tpot": plan.tpot,
        "gap": plan.gap,
        "output_tokens_per_second_and_device": plan.tokens_per_device,
        "pools": [_pool(pool) for pool in plan.pools],
        "refused": [{"layout": layout, "reason": reason} for layout, reason in plan.refused],
        "compared": [
            {"techniques": name, "devices": None if found is None else found.devices}
            for name, found in compared
        ],
        "notes": NOTES,
    }


def _pool(pool: Pool) -> dict[str, Any]:
    replica = pool.model.replica
    return {
        "purpose": pool.purpose,
        "tensor": replica.tensor,
        "expert": replica.expert,
        "pipeline": replica.pipeline,
        "attention": replica.attention,
        "replicas": pool.replicas,
        "devices": pool.devices,
        "service": dataclasses.asdict(pool.service),
        "memory": memory(pool),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _gib(count: float) -> str:
    return f"{count / _GIB:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if math.isfinite(seconds) else "none"
