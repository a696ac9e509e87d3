"""Part "throughput": the whole engine on the load of nano-vllm's benchmark.

256 requests arrive at once, with prompts and outputs of 100 to 1024 tokens, evenly distributed; end tokens are
ignored and tokens are sampled at temperature 0.6, as in that project's ``bench.py``.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.compiling import Job, compile_all, lower
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Model,
    Shape,
    cache_shapes,
    ops_of,
    random_params,
    shapes,
)
from benchmarks.gpu.step_programs import compile_sampler
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.kv_cache.layout import group_layers
from jaxinfer.models.decoder import kv_specs
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenization.chat import ChatTemplate
from pallas_kernels.kv_storage import storage_dtype

MEMORY_SHARE = 0.8
PROGRESS_SECONDS = 5.0
LEAST_SECONDS = {"qwen3-0.6b": 35.0, "llama3-8b": 55.0, "tiny": 5.0}
"""That a measurement takes, compilation included; it is not begun with less."""


@dataclass(frozen=True)
class Load:
    """Requests and the shapes that serve them.

    Attributes:
        lengths: tokens of prompt and output of each request.
    """

    lengths: tuple[tuple[int, int], ...]
    token_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    max_num_seqs: int

    @property
    def blocks(self) -> int:
        """KV blocks of all requests at full length."""
        return sum(-(-(p + o) // BLOCK_SIZE) for p, o in self.lengths)


def load(smoke: bool) -> Load:
    """The load of nano-vllm, or a tiny one."""
    rng = random.Random(0)
    if smoke:
        return Load(((5, 4), (9, 6), (3, 5)), (2, 16), (2,), 2)
    lengths = tuple((rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256))
    # Fewer buckets than a server has: each costs a compilation, and most steps have all rows.
    return Load(lengths, (16, 64, 128, 192, 256, 1024, 4096, 8192), (64, 256), 256)


def run(context: Context) -> None:
    """The models with Pallas kernels, the smallest first, and then without."""
    models = {shape.name: shape for shape in shapes(context.settings.smoke)}
    kinds = ("pallas",) if context.settings.smoke else ("pallas", "xla")
    names = [f"{name}/{kernels}" for kernels in kinds for name in models]
    for name in context.plan(names):
        model, kernels = name.split("/")
        context.attempt(name, LEAST_SECONDS[model], partial(_measure, context, models[model], kernels))


def _measure(context: Context, shape: Shape, kernels: str) -> dict[str, Any]:
    requests = load(context.settings.smoke)
    model = Model.make(shape, ops_of(kernels, context.generation))
    plan = CompilePlan(
        token_buckets=requests.token_buckets,
        row_buckets=requests.row_buckets,
        scored_rows=requests.row_buckets[0],
        copied_blocks=4,
        max_num_seqs=requests.max_num_seqs,
        table_width=MAX_MODEL_LEN // BLOCK_SIZE,
        num_groups=1,
        block_size=BLOCK_SIZE,
    )
    num_blocks = _num_blocks(model, requests)
    functions = StepFunctions.make(model.parts, plan, model.groups)
    started = time.perf_counter()
    _compile(context, model, plan, functions, num_blocks)
    engine = _engine(context, model, plan, functions, num_blocks)
    ready = time.perf_counter() - started
    context.say(f"throughput: {shape.name}, {kernels}: ready after {ready:.0f} s")
    return {"model": shape.name, "kernels": kernels, "ready_seconds": ready} | _run(context, engine, requests)


def _num_blocks(model: Model, requests: Load) -> int:
    """Blocks for all requests, or as many as fit.

    Raises:
        MemoryError: the weights leave no room.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    wanted = requests.blocks + 1
    if limit is None:
        return wanted
    room = MEMORY_SHARE * limit - model.weight_bytes
    fitting = min(wanted, int(room / (BLOCK_SIZE * model.token_bytes)))
    if fitting < 2 * MAX_MODEL_LEN // BLOCK_SIZE:
        raise MemoryError(
            f"weights of {model.weight_bytes / 2**30:.0f} GiB leave no room for a cache on a device of "
            f"{limit / 2**30:.0f} GiB"
        )
    return fitting


def _compile(
    context: Context, model: Model, plan: CompilePlan, functions: StepFunctions, num_blocks: int
) -> None:
    """Compiles in threads what the warm-up would compile one by one; it finds them in JAX's caches then."""
    parts, cache = model.parts, cache_shapes(model, num_blocks)
    sampler = DeviceSampler(model.config.vocab_size, plan, ())
    hidden_XD = jax.ShapeDtypeStruct((plan.token_buckets[-1], model.config.hidden_size), model.dtype)

    def backbone(tokens: int) -> None:
        packed = jax.ShapeDtypeStruct((Packing.make(plan, tokens).size,), jnp.int32)
        newest_W = jax.ShapeDtypeStruct(sampler.newest_W.shape, jnp.int32)
        embed = lower(functions.embed, model.leaves(parts.embed_paths), newest_W, packed, tokens)
        embed.compile()
        x_TD, ropes, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), embed.out_info)
        for segment in {segment.kind: segment for segment in parts.segments}.values():
            part = cache[segment.first : segment.first + segment.num_layers]
            leaves = model.leaves(segment.paths)
            lower(functions.segments[segment.kind], leaves, part, x_TD, ropes, batch).compile()
        lower(functions.store, hidden_XD, x_TD).compile()

    jobs = [Job(f"backbone-{tokens}", partial(backbone, tokens)) for tokens in plan.token_buckets]
    jobs += [
        Job(f"head-{rows}", partial(functions.compile_head, model.parts, hidden_XD, rows))
        for rows in plan.row_buckets
    ]
    jobs += [Job(f"sampler-{rows}", partial(compile_sampler, model, plan, rows)) for rows in plan.row_buckets]
    futures = compile_all(jobs, context.settings.threads, context.seconds_left)
    late = [name for name, future in futures.items() if not future.done() or future.cancelled()]
    if late:
        raise TimeoutError(f"not compiled in time: {', '.join(late)}")
    for future in futures.values():
        future.result(0)


def _engine(
    context: Context, model: Model, plan: CompilePlan, functions: StepFunctions, num_blocks: int
) -> Engine:
    config = EngineConfig(
        model=ModelConfig(reference="random"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.token_buckets[-1]
        ),
        compile=CompileConfig(cache_dir="none", warm_up="lazy" if context.settings.smoke else "full"),
    )
    specs = kv_specs(model.config)
    windows, groups = group_layers(specs)
    stored = storage_dtype(model.dtype, model.ops.platform)
    runner = JaxRunner(
        ModelPrograms(model.parts, random_params(model), functions),
        allocate(specs, groups, (num_blocks,), BLOCK_SIZE, stored, {}),
        plan,
        DeviceSampler(model.config.vocab_size, plan, (), model.ops.truncated_draw),
        hidden_size=model.config.hidden_size,
        dtype=model.dtype,
    )
    return assemble(
        config,
        runner,
        plan,
        (num_blocks,),
        windows,
        tokenizer=None,
        chat_template=object.__new__(ChatTemplate),  # nobody chats here, and a real one needs jinja2
        vocab_size=model.config.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
    )


def _run(context: Context, engine: Engine, requests: Load) -> dict[str, Any]:
    _add(engine, requests.lengths, engine.limits.vocab_size)
    core, stats = engine.core, engine.core.stats
    started = said = time.perf_counter()
    while core.has_work and context.seconds_left > 0.5:
        core.step()
        now = time.perf_counter()
        if now - said > PROGRESS_SECONDS:
            said, rate = now, stats.generated_tokens / (now - started)
            context.say(f"throughput: {stats.generated_tokens} tokens, {rate:.0f} tok/s")
    seconds = time.perf_counter() - started
    rate = stats.generated_tokens / seconds
    share = stats.host_seconds / (stats.host_seconds + stats.device_seconds)
    summary = f"{rate:.0f} output tok/s, {100 * share:.0f} % of a step is the host's"
    if core.has_work:
        summary += f"; stopped after {stats.generated_tokens} tokens, its time was over"
    return {
        "complete": not core.has_work,
        "seconds": seconds,
        "output_tokens": stats.generated_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens_per_second": rate,
        "steps": stats.steps_committed,
        "host_seconds": stats.host_seconds,
        "device_seconds": stats.device_seconds,
        "host_share": share,
        "preemptions": stats.preemptions,
        "padded_tokens": stats.padded_tokens,
        "summary": summary,
    }


def _add(engine: Engine, lengths: Sequence[tuple[int, int]], vocab_size: int) -> None:
    rng = random.Random(1)
    for index, (prompt, output) in enumerate(lengths):
        ids = [rng.randrange(min(vocab_size, 10_000)) for _ in range(prompt)]
        params = SamplingParams(temperature=0.6, max_tokens=output, ignore_eos=True, detokenize=False)
        engine.core.add(engine.inputs.process(str(index), {"prompt_token_ids": ids}, params))
