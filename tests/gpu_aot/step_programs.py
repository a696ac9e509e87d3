"""The engine's step of a 4-layer model with the widths of Llama-3-8B, as programs to compile for a GPU.

Each function here runs in a process of its own, see ``pallas_kernels.aot.isolated``.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import SchedulerConfig
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.kv_cache.layout import LayerKV
from jaxinfer.models.build import logical_axes
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
from sharding.kernels import attention_over_heads, rope_kv_write_over_heads

LAYERS = 4
BLOCKS = 509
"""Blocks of a pool: 133 MB in all. A prime, so that no other array has this size."""
POOL_BYTES = BLOCKS * 8 * 16 * 128 * 2
MAX_MODEL_LEN = 8192
SEQUENCES = 64
STEP_TOKENS = 2048
GROUPS = (0,) * LAYERS

DEVICES = 2
AXIS = "tensor"
SHARDED = ("vocab", "qkv", "heads", "gate_up", "mlp")
"""Logical axes that tensor parallelism spreads over the devices."""
_CACHE_SPEC = LayerKV(
    PartitionSpec(None, AXIS), PartitionSpec(None, AXIS), PartitionSpec(AXIS), PartitionSpec(AXIS)
)
# Without COLLECTIVES each all-reduce ends a CUDA graph: nine launches of graphs a step instead of one.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,COLLECTIVES"
}
_split = jnp.split

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

    @cached_property
    def config(self) -> TransformerConfig:
        return parse_config(LLAMA_3_8B)

    @cached_property
    def model(self) -> SegmentedModel:
        return segmented_model(
            self.config,
            self.ops,
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
        return StepFunctions.make(self.model, self.plan, GROUPS)

    def kv_cache(self) -> Any:
        return jax.eval_shape(
            lambda: allocate(kv_specs(self.config), GROUPS, (BLOCKS,), 16, jnp.dtype(jnp.bfloat16), {})
        )

    def hidden(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tokens, self.config.hidden_size), jnp.bfloat16)

    def packed(self, tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((Packing.make(self.plan, tokens).size,), jnp.int32)

    def embedded(self, tokens: int) -> Any:
        """Shapes of what the embedding program returns."""
        leaves = tuple(self.model.shapes[path] for path in self.model.embed_paths)
        embed = self.functions.embed
        newest_W = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
        return jax.eval_shape(lambda *args: embed(*args, tokens), leaves, newest_W, self.packed(tokens))


def segment(backend: str, tokens: int) -> Program:
    """One layer, as the engine compiles a segment."""
    step = Step(_ops(backend), layers_per_segment=1)
    return _segment(step, tokens)


def backbone(backend: str, tokens: int) -> Program:
    """All layers of a step and the head: the programs of the engine, composed in one."""
    return _backbone(Step(_ops(backend), layers_per_segment=LAYERS), tokens)


def sharded_segment(backend: str, tokens: int) -> Program:
    """``segment`` on two devices, with heads and MLP sharded."""
    step = Step(_over_heads(_ops(backend)), layers_per_segment=1)
    part = step.model.segments[0]
    weights = tuple(_weight_specs(step)[path] for path in part.paths)
    specs = (weights, (_CACHE_SPEC,), PartitionSpec(), PartitionSpec(), PartitionSpec())
    return _sharded(_segment(step, tokens), specs, out_specs=(PartitionSpec(), (_CACHE_SPEC,)))


def sharded_backbone(backend: str, tokens: int) -> Program:
    """``backbone`` on two devices. The logits stay sharded over the vocabulary."""
    step = Step(_over_heads(_ops(backend)), layers_per_segment=LAYERS)
    whole = PartitionSpec()
    specs = (_weight_specs(step), (_CACHE_SPEC,) * LAYERS, whole, whole, whole, whole)
    logits = PartitionSpec(None, AXIS)
    return _sharded(_backbone(step, tokens), specs, out_specs=((_CACHE_SPEC,) * LAYERS, whole, logits))


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
    leaves = tuple(step.model.shapes[path] for path in part.paths)
    args = (leaves, step.kv_cache()[: part.num_layers], *step.embedded(tokens))
    return Program(step.functions.segments[part.kind], args, donate=(1, 2))


def _backbone(step: Step, tokens: int) -> Program:
    def run(params: Any, kv_cache: Any, hidden_XD: Any, newest_W: Any, packed: Any, index_P: Any) -> Any:
        programs = ModelPrograms(step.model, params, step.functions)
        kv_cache, hidden_XD = programs.backbone(kv_cache, hidden_XD, newest_W, packed, tokens)
        return kv_cache, hidden_XD, programs.head(hidden_XD, index_P)

    newest_W = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
    index_P = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32)
    hidden_XD = step.hidden(STEP_TOKENS)
    args = (step.model.shapes, step.kv_cache(), hidden_XD, newest_W, step.packed(tokens), index_P)
    return Program(run, args, donate=(1, 2))


def _ops(backend: str) -> Ops:
    return select_ops(backend, platform="gpu", strict=True, generation="hopper")


def _over_heads(ops: Ops) -> Ops:
    return replace(
        ops,
        attention=attention_over_heads(ops.attention, AXIS),
        rope_kv_write=rope_kv_write_over_heads(ops.rope_kv_write, AXIS),
    )


def _weight_specs(step: Step) -> dict[str, PartitionSpec]:
    axes = logical_axes(step.config, step.ops, jnp.dtype(jnp.bfloat16))
    return {
        path: PartitionSpec(*(AXIS if name in SHARDED else None for name in names))
        for path, names in axes.items()
    }


def _sharded(program: Program, specs: Any, out_specs: Any) -> Program:
    # Projections that are concatenations hold the parts of one device after those of the other. Kernels see the
    # device's own parts; the MLP takes gate and up apart outside of them.
    jnp.split = _split_by_device
    return replace(program, axes={AXIS: DEVICES}, specs=specs, out_specs=out_specs, options=GRAPHS)


def _split_by_device(x: jax.Array, parts: int, axis: int) -> list[jax.Array]:
    """``jnp.split`` of the last axis, which holds, device after device, the device's share of every part."""
    assert axis == -1
    local = x.reshape(*x.shape[:-1], DEVICES, -1)
    return [part.reshape(*x.shape[:-1], -1) for part in _split(local, parts, axis=-1)]
