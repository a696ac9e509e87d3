"""The compiled programs of one step, for a number of tokens and a set of compiler options."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.compiling import lower
from benchmarks.gpu.models import BLOCK_SIZE, Model, cache_shapes
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.kv_cache.layout import KVCache
from jaxinfer.models.segments import SegmentKind
from jaxinfer.runner.programs import StepFunctions
from jaxinfer.sampling.device import sample
from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.inputs import SamplerState, SamplingInputs
from jaxinfer.sampling.state import init_state
from jaxinfer.sampling_params import SamplingParams


@dataclass(frozen=True)
class Load:
    """What a step computes.

    Attributes:
        rows: sequences, each with ``tokens`` new ones at the end of its ``context`` tokens.
    """

    rows: int
    tokens: int
    context: int

    @property
    def blocks(self) -> int:
        """KV blocks of all sequences."""
        return self.rows * -(-self.context // BLOCK_SIZE)


def plan_for(loads: tuple[Load, ...], max_num_seqs: int) -> CompilePlan:
    """One plan that has a bucket of the right size for each load."""
    tokens = {1, *(load.rows * load.tokens for load in loads)}
    rows = {load.rows for load in loads}
    return CompilePlan(
        token_buckets=tuple(sorted(tokens)),
        row_buckets=tuple(sorted(rows)),
        scored_rows=1,
        copied_blocks=4,
        max_num_seqs=max_num_seqs,
        table_width=max(-(-load.context // BLOCK_SIZE) for load in loads),
        num_groups=1,
        block_size=BLOCK_SIZE,
    )


def packed_batch(plan: CompilePlan, load: Load, num_blocks: int, vocab_size: int) -> np.ndarray:
    """The step's input: random tokens, and blocks scattered over the pool."""
    T = load.rows * load.tokens
    random = np.random.default_rng(0)
    packing = Packing.make(plan, T)
    packed = np.zeros(packing.size, np.int32)
    token_ids, positions, query_start, context_len, table_RM, slots = packing.views(packed)
    token_ids[:] = random.integers(0, vocab_size, T)
    query_start[: load.rows + 1] = np.arange(load.rows + 1) * load.tokens
    query_start[load.rows + 1 :] = T
    context_len[: load.rows] = load.context
    width = load.blocks // load.rows
    blocks = 1 + random.permutation(num_blocks - 1)[: load.blocks].reshape(load.rows, width)
    table_RM[: load.rows, :width] = blocks
    position_rt = np.arange(load.context - load.tokens, load.context)[None, :].repeat(load.rows, 0)
    positions[:] = position_rt.reshape(-1)
    row_rt = np.arange(load.rows)[:, None]
    slots[:] = (blocks[row_rt, position_rt // BLOCK_SIZE] * BLOCK_SIZE + position_rt % BLOCK_SIZE).reshape(-1)
    return packed


def sampling_inputs(plan: CompilePlan, rows: int, vocab_size: int) -> SamplingInputs:
    """Rows that sample at temperature 0.6."""
    table = SamplingTable(plan.max_num_seqs, vocab_size)
    for slot in range(rows):
        table.set(slot, SamplingParams(temperature=0.6), (1, slot), 1, ())
    return table.build(np.arange(rows), np.full(rows, 1), rows)


def compile_sampler(model: Model, plan: CompilePlan, rows: int) -> jax.stages.Compiled:
    """(logits, inputs, state) -> (outputs, state), for so many rows."""
    vocab_size = model.config.vocab_size
    state = jax.eval_shape(lambda: init_state(plan.max_num_seqs, vocab_size))
    logits_PV = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
    inputs = sampling_inputs(plan, rows, vocab_size)
    sampler = jax.jit(sample, donate_argnums=(2,), static_argnums=(3,))
    return sampler.lower(logits_PV, inputs, state, model.ops.truncated_draw).compile()


@dataclass(frozen=True)
class StepPrograms:
    """Compiled parts of a step of T tokens, of which P rows need logits."""

    model: Model
    embed: jax.stages.Compiled
    segments: dict[SegmentKind, jax.stages.Compiled]
    store: jax.stages.Compiled
    head: jax.stages.Compiled

    @classmethod
    def compile(
        cls, model: Model, plan: CompilePlan, load: Load, num_blocks: int, options: Mapping[str, Any]
    ) -> "StepPrograms":
        """Compiles from shapes; nothing is allocated."""
        T, rows = load.rows * load.tokens, load.rows
        parts, chosen = model.parts, dict(options) or None
        functions = StepFunctions.make(parts, plan, model.groups)
        state = jax.eval_shape(lambda: init_state(plan.max_num_seqs, model.config.vocab_size))
        packed = jax.ShapeDtypeStruct((Packing.make(plan, T).size,), jnp.int32)
        embed = lower(functions.embed, model.leaves(parts.embed_paths), state.newest_W, packed, T)
        x_TD, ropes, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), embed.out_info)
        cache = cache_shapes(model, num_blocks)
        segments = {}
        for segment in parts.segments:
            if segment.kind not in segments:
                part = cache[segment.first : segment.first + segment.num_layers]
                run, leaves = functions.segments[segment.kind], model.leaves(segment.paths)
                lowered = lower(run, leaves, part, x_TD, ropes, batch)
                segments[segment.kind] = lowered.compile(compiler_options=chosen)
        hidden_XD = jax.ShapeDtypeStruct((plan.token_buckets[-1], model.config.hidden_size), model.dtype)
        index_P = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return cls(
            model=model,
            embed=embed.compile(compiler_options=chosen),
            segments=segments,
            store=lower(functions.store, hidden_XD, x_TD).compile(compiler_options=chosen),
            head=functions.head.lower(model.leaves(parts.head_paths), hidden_XD, index_P).compile(
                compiler_options=chosen
            ),
        )


@dataclass
class StepState:
    """What a step reads and replaces on the device."""

    cache: KVCache
    hidden_XD: jax.Array
    sampler: SamplerState

    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves((self.cache, self.hidden_XD, self.sampler))


@dataclass(frozen=True)
class Step:
    """Programs with weights and inputs: what is left is to call it, as often as wanted."""

    programs: StepPrograms
    sample: jax.stages.Compiled
    params: Mapping[str, jax.Array]
    packed: np.ndarray
    index_P: np.ndarray
    inputs: SamplingInputs

    def dispatch(self, state: StepState) -> jax.Array:
        """Starts the step; returns its tokens, which are not waited for."""
        programs, parts = self.programs, self.programs.model.parts

        def leaves(paths: tuple[str, ...]) -> tuple[jax.Array, ...]:
            return tuple(self.params[path] for path in paths)

        x_TD, ropes, batch = programs.embed(leaves(parts.embed_paths), state.sampler.newest_W, self.packed)
        cache = list(state.cache)
        for segment in parts.segments:
            span = slice(segment.first, segment.first + segment.num_layers)
            run = programs.segments[segment.kind]
            x_TD, cache[span], _ = run(leaves(segment.paths), tuple(cache[span]), x_TD, ropes, batch)
        state.cache = tuple(cache)
        state.hidden_XD = programs.store(state.hidden_XD, x_TD)
        logits_PV = programs.head(leaves(parts.head_paths), state.hidden_XD, self.index_P)
        outputs, state.sampler = self.sample(logits_PV, self.inputs, state.sampler)
        return outputs.token_P
