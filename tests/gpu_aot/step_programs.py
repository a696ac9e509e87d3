"""The engine's step of a 4-layer model with the widths of Llama-3-8B, as programs to compile for a GPU.

Each function here runs in a process of its own, see ``pallas_kernels.aot.isolated``.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import SchedulerConfig
from jaxinfer.kv_cache.allocate import cache_structs
from jaxinfer.kv_cache.layout import KVCache, kv_partition
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import parse_config
from jaxinfer.models.segments import SegmentedModel, segmented_model
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.sampling.device import sample
from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.state import init_state
from pallas_kernels.aot.compile import Program
from pallas_kernels.ops import Ops
from pallas_kernels.select import select_ops
from sharding.layout import ONE_DEVICE, WHOLE, Layout
from sharding.mesh import EXPERT, TENSOR, axis_rules

LAYERS = 4
BLOCKS = 509
"""Blocks of a pool: 133 MB in all. A prime, so that no other array has this size."""
POOL_BYTES = BLOCKS * 8 * 16 * 128 * 2
MAX_MODEL_LEN = 8192
SEQUENCES = 64
STEP_TOKENS = 2048
GROUPS = (0,) * LAYERS

# Without COLLECTIVES each all-reduce ends a CUDA graph: nine launches of graphs a step instead of one.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,COLLECTIVES"
}

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}


@dataclass(frozen=True)
class Step:
    """The engine's functions and the shapes of their arguments."""

    ops: Ops
    layers_per_segment: int
    layout: Layout = ONE_DEVICE

    @cached_property
    def config(self) -> TransformerConfig:
        return parse_config(LLAMA_3_8B)

    @cached_property
    def model(self) -> SegmentedModel:
        return segmented_model(
            self.config,
            replace(self.ops, shards=self.layout.rules),
            jnp.dtype(jnp.bfloat16),
            param_dtype=jnp.dtype(jnp.bfloat16),
            max_model_len=MAX_MODEL_LEN,
            layers_per_segment=self.layers_per_segment,
        )

    @cached_property
    def plan(self) -> CompilePlan:
        scheduler = SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS)
        return CompilePlan.make(scheduler, MAX_MODEL_LEN, block_size=16, num_groups=1, min_tokens=2)

    @cached_property
    def functions(self) -> StepFunctions:
        return StepFunctions.make(self.model, self.plan, GROUPS, self.layout)

    def kv_cache(self) -> KVCache:
        return cache_structs(kv_specs(self.config), BLOCKS, 16, jnp.dtype(jnp.bfloat16), self.layout)

    def hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self.config.hidden_size), jnp.bfloat16)

    def packed(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((Packing.make(self.plan, tokens).size,), jnp.int32)

    def embedded(self, tokens: int) -> Any:
        """Shapes of what the embedding program returns; the same for every number of devices."""
        alone = replace(self, layout=ONE_DEVICE)
        leaves = alone.model.structs(alone.model.embed_paths)
        embed = alone.functions.embed
        newest_W = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
        return jax.eval_shape(lambda *args: embed(*args, tokens), leaves, newest_W, self.packed(tokens))


def segment(backend: str, tokens: int) -> Program:
    """One layer, as the engine compiles a segment."""
    step = Step(_ops(backend), layers_per_segment=1)
    return _segment(step, tokens)


def backbone(backend: str, tokens: int) -> Program:
    """All layers of a step and the head: the programs of the engine, composed in one."""
    return _backbone(Step(_ops(backend), layers_per_segment=LAYERS), tokens)


def sharded_segment(backend: str, tokens: int, devices: int) -> Program:
    """``segment`` with heads and MLP sharded."""
    step = Step(_ops(backend), layers_per_segment=1, layout=_layout(devices))
    cache = (kv_partition(step.layout.rules),)
    weights = step.model.specs(step.model.segments[0].paths, step.layout)
    specs = (weights, cache, WHOLE, WHOLE, WHOLE)
    return _sharded(_segment(step, tokens), devices, specs, out_specs=(WHOLE, cache, WHOLE))


def sharded_backbone(backend: str, tokens: int, devices: int) -> Program:
    """``backbone`` with all weights sharded. The logits stay sharded over the vocabulary."""
    step = Step(_ops(backend), layers_per_segment=LAYERS, layout=_layout(devices))
    rules, paths = step.layout.rules, tuple(step.model.shapes)
    cache = (kv_partition(rules),) * LAYERS
    weights = dict(zip(paths, step.model.specs(paths, step.layout)))
    specs = (weights, cache, WHOLE, WHOLE, WHOLE, WHOLE)
    logits = rules.spec((None, "vocab"))
    return _sharded(_backbone(step, tokens), devices, specs, out_specs=(cache, WHOLE, logits))


def sampler(backend: str) -> Program:
    """Sampling of a decode step."""
    draw = _ops(backend).truncated_draw
    vocab = LLAMA_3_8B["vocab_size"]
    table = SamplingTable(SEQUENCES, vocab)
    inputs = table.build(np.arange(SEQUENCES), np.ones(SEQUENCES, np.int32), SEQUENCES)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), inputs)
    logits_PV = jax.ShapeDtypeStruct((SEQUENCES, vocab), jnp.float32)
    state = jax.eval_shape(lambda: init_state(SEQUENCES, vocab))
    return Program(partial(sample, draw_op=draw), (logits_PV, inputs, state), donate=(2,))


def _segment(step: Step, tokens: int) -> Program:
    part = step.model.segments[0]
    leaves = step.model.placed_structs(part.paths, step.layout)
    args = (leaves, step.kv_cache()[: part.num_layers], *step.embedded(tokens))
    return Program(step.functions.segments[part.kind], args, donate=(1, 2))


def _backbone(step: Step, tokens: int) -> Program:
    def run(params: Any, kv_cache: Any, hidden_XD: Any, newest_W: Any, packed: Any, index_P: Any) -> Any:
        programs = ModelPrograms(step.model, params, step.functions)
        kv_cache, hidden_XD, _ = programs.backbone(kv_cache, hidden_XD, newest_W, packed, tokens)
        return kv_cache, hidden_XD, programs.head(hidden_XD, index_P)

    newest_W = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
    index_P = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32)
    hidden_XD = step.hidden(STEP_TOKENS)
    paths = tuple(step.model.shapes)
    params = dict(zip(paths, step.model.placed_structs(paths, step.layout)))
    args = (params, step.kv_cache(), hidden_XD, newest_W, step.packed(tokens), index_P)
    return Program(run, args, donate=(1, 2))


def _ops(backend: str) -> Ops:
    return select_ops(backend, platform="gpu", strict=True, generation="hopper")


def _layout(devices: int) -> Layout:
    """The mesh is the one that is current while the program is compiled."""
    return Layout(axis_rules(tensor=devices, expert=1))


def _sharded(program: Program, devices: int, specs: Any, out_specs: Any) -> Program:
    axes = {EXPERT: 1, TENSOR: devices}
    return replace(program, axes=axes, specs=specs, out_specs=out_specs, options=GRAPHS)
