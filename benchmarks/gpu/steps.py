"""Part "steps": how long one step of a model takes, with Pallas kernels and without, CUDA graphs on and off."""

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.compiling import Job, compile_all
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import Model, Shape, ops_of, random_cache, random_params, shapes
from benchmarks.gpu.step_programs import (
    Load,
    Step,
    StepPrograms,
    StepState,
    compile_sampler,
    packed_batch,
    plan_for,
    sampling_inputs,
)
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.sampling.state import init_state

BATCHES = (1, 16, 64, 256)
CONTEXT = 1024
PREFILL = 2048
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
MEMORY_SHARE = 0.8
"""Of the device, for weights and cache."""

COMPILE_SHARE = 0.7
"""Of a model's time; what is not compiled by then is left out."""

MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Variant:
    """One thing to measure.

    Attributes:
        kernels: "pallas" or "xla".
        graphs: command buffers, XLA's CUDA graphs.
    """

    load: Load
    kernels: str
    graphs: bool = True

    @property
    def phase(self) -> str:
        return "decode" if self.load.tokens == 1 else "prefill"

    def name(self, model: str) -> str:
        size = f"b{self.load.rows}" if self.phase == "decode" else f"t{self.load.tokens}"
        return f"{model}/{self.phase}-{size}/{self.kernels}{'' if self.graphs else '/no-graphs'}"


def variants(smoke: bool) -> list[Variant]:
    """The most important first: it is the order in which they compile."""
    if smoke:
        decode = Load(2, 1, 32)
        return [Variant(decode, "pallas"), Variant(decode, "xla"), Variant(decode, "pallas", graphs=False)]
    decodes = [Load(rows, 1, CONTEXT) for rows in BATCHES]
    loads = [*decodes, Load(1, PREFILL, PREFILL)]
    found = [Variant(load, kernels) for kernels in ("pallas", "xla") for load in loads]
    return found + [Variant(load, "pallas", graphs=False) for load in decodes]


def run(context: Context) -> None:
    """Measures all variants of one model after the other."""
    wanted: dict[str, tuple[Shape, Variant]] = {
        variant.name(shape.name): (shape, variant)
        for shape in shapes(context.settings.smoke)
        for variant in variants(context.settings.smoke)
    }
    todo = context.plan(wanted)
    models = shapes(context.settings.smoke)
    for index, shape in enumerate(models):
        mine = {name: wanted[name][1] for name in todo if wanted[name][0].name == shape.name}
        if mine:
            _run_model(context, shape, mine, context.seconds_left / (len(models) - index))


class _States:
    """The arrays that all variants of a model use in turn; made again if a step that failed took them along."""

    def __init__(self, model: Model, plan: CompilePlan, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._model = model
        self._plan = plan
        self._state: StepState | None = None

    def ready(self) -> StepState:
        if self._state is None or any(x.is_deleted() for x in self._state.arrays()):
            self._state = None
            self._state = StepState(
                random_cache(self._model, self.num_blocks),
                jnp.zeros((self._plan.token_buckets[-1], self._model.config.hidden_size), self._model.dtype),
                init_state(self._plan.max_num_seqs, self._model.config.vocab_size),
            )
        return self._state


def _run_model(context: Context, shape: Shape, wanted: Mapping[str, Variant], seconds: float) -> None:
    """Measures variants of a model; ``seconds`` is what there is for it."""
    models = {
        kernels: Model.make(shape, ops_of(kernels, context.generation)) for kernels in ("pallas", "xla")
    }
    model = models["pallas"]
    fitting = {name: variant for name, variant in wanted.items() if _fits(context, name, model, variant.load)}
    if not fitting:
        return
    loads = tuple({variant.load for variant in fitting.values()})
    plan = plan_for(loads, max(load.rows for load in loads))
    num_blocks = 1 + max(load.blocks for load in loads)
    context.say(f"steps: {shape.name}: compiling {len(fitting)} variants")
    jobs = [
        Job(
            name,
            partial(
                StepPrograms.compile,
                models[variant.kernels],
                plan,
                variant.load,
                num_blocks,
                {} if variant.graphs else WITHOUT_GRAPHS,
            ),
        )
        for name, variant in fitting.items()
    ]
    sampled = sorted({(variant.kernels, variant.load.rows) for variant in fitting.values()})
    samplers = [
        Job(f"sampler-{kernels}-{rows}", partial(compile_sampler, models[kernels], plan, rows))
        for kernels, rows in sampled
    ]
    threads = 1 if context.settings.serial else context.settings.threads
    futures = compile_all([*samplers, *jobs], threads, COMPILE_SHARE * seconds)
    params = random_params(model)
    states = _States(model, plan, num_blocks)
    for name, variant in fitting.items():
        needs = [futures[name], futures[f"sampler-{variant.kernels}-{variant.load.rows}"]]
        if not all(future.done() and not future.cancelled() for future in needs):
            context.recorder.end("steps", name, "skipped", reason="it was not compiled in time")
            continue
        context.attempt(name, 1.0, partial(_measure, context, variant, plan, params, states, *needs))


def _fits(context: Context, name: str, model: Model, load: Load) -> bool:
    """Whether weights and cache fit the device; noted as skipped if they do not."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    needed = model.weight_bytes + load.rows * load.context * model.token_bytes
    if limit is None or needed <= MEMORY_SHARE * limit:
        return True
    context.recorder.end(
        "steps",
        name,
        "skipped",
        reason=f"weights and cache take {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}",
    )
    return False


def _measure(
    context: Context,
    variant: Variant,
    plan: CompilePlan,
    params: Mapping[str, jax.Array],
    states: "_States",
    compiled: Future,
    sampler: Future,
) -> dict[str, Any]:
    programs: StepPrograms = compiled.result(0)
    load, model = variant.load, programs.model
    step = Step(
        programs,
        sampler.result(0),
        params,
        packed_batch(plan, load, states.num_blocks, model.config.vocab_size),
        (np.arange(1, load.rows + 1) * load.tokens - 1).astype(np.int32),
        sampling_inputs(plan, load.rows, model.config.vocab_size),
    )
    seconds, host = _time(step, states.ready())
    floor, bound = _floor(context, model, load)
    values: dict[str, Any] = {
        "model": model.name,
        "phase": variant.phase,
        "batch": load.rows,
        "tokens": load.tokens,
        "context": load.context,
        "kernels": variant.kernels,
        "command_buffers": variant.graphs,
        "seconds": seconds,
        "host_seconds": host,
        "tokens_per_second": load.rows * load.tokens / seconds,
        "bound": bound,
        "share": floor / seconds,
    }
    summary = f"{1e3 * seconds:.2f} ms, {100 * values['share']:.0f} % of the {bound} ceiling"
    return values | {"summary": f"{summary}, host {1e3 * host:.2f} ms"}


def _time(step: Step, state: StepState) -> tuple[float, float]:
    """Seconds of a step, when steps are dispatched one behind the other; and of the host to dispatch it."""
    jax.block_until_ready(step.dispatch(state))
    start = time.perf_counter()
    jax.block_until_ready(step.dispatch(state))
    once = time.perf_counter() - start
    count = max(2, min(30, int(MEASURE_SECONDS / 3 / once)))
    walls, hosts = [], []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            tokens_P = step.dispatch(state)
            hosts.append(time.perf_counter() - before)
        jax.block_until_ready(tokens_P)
        walls.append((time.perf_counter() - start) / count)
    return statistics.median(walls), statistics.median(hosts)


def _floor(context: Context, model: Model, load: Load) -> tuple[float, str]:
    """The least seconds: weights and cache are read once, every parameter takes part in one multiply-add per token."""
    moved = model.weight_bytes + load.rows * load.context * model.token_bytes
    config = model.config
    T = load.rows * load.tokens
    head = config.vocab_size * config.hidden_size
    products = 2 * T * (model.weight_bytes // model.dtype.itemsize - head) + 2 * load.rows * head
    pairs = load.rows * load.tokens * (load.context - (load.tokens - 1) / 2)
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    peak = 1e12 * context.ceilings.tflops.get("bf16", 0.1)
    by_bytes, by_flops = moved / context.ceilings.bandwidth, (products + attention) / peak
    return (by_bytes, "bytes") if by_bytes >= by_flops else (by_flops, "flops")
