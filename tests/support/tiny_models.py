"""Tiny LM: a real Llama-like model of two layers with random float32 weights, and a dense NumPy forward of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.kv_scales import LayerScales
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.kv_cache.allocate import CACHE_DTYPES, allocate
from jaxinfer.kv_cache.layout import group_layers
from jaxinfer.kv_transfer.connector import KVConnector
from jaxinfer.kv_transfer.layout import BlockLayout
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import parse_config
from jaxinfer.models.segments import SegmentedModel, segmented_model
from jaxinfer.runner.block_transfers import BlockTransfers
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.runner.protocol import Runner
from jaxinfer.speculative.draft_model import DraftModel
from jaxinfer.speculative.head_drafter import HeadDrafter
from jaxinfer.tokenization.chat import ChatTemplate
from jaxinfer.tokenization.tokenizer import Tokenizer
from pallas_kernels.kv_storage import storage_dtype
from pallas_kernels.ops import Ops
from sharding.layout import ONE_DEVICE, Layout
from tests.support import engines
from tests.support.kernels import kernel_ops

MAX_MODEL_LEN = 64
DEVICE_BLOCKS = 64
"""Blocks on the device, whatever the scheduler may use of them: pools of one shape share the compiled programs."""
MAX_SEQS, MAX_TOKENS = 4, 32
"""Most sequences and tokens of a step in tests that share their programs."""
MIN_GAP = 1e-3
"""Smallest distance of the two largest logits on test prompts: rounding cannot flip a greedy token."""

Windows = tuple[int | None, int | None]
FULL: Windows = (None, None)
MIXED: Windows = (8, None)
WINDOWED: Windows = (8, 8)

_HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": engines.VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": list(engines.EOS),
}


@dataclass(frozen=True)
class Beside:
    """What a drafter shares with the model it drafts for."""

    target: "TinyModel"
    plan: CompilePlan
    programs: ModelPrograms
    builder: BatchBuilder
    sampler: DeviceSampler


MakeDrafter = Callable[[Beside], DraftModel | HeadDrafter]


def draft_model(model: "TinyModel") -> MakeDrafter:
    """A model drafts for another one."""

    def make(beside: Beside) -> DraftModel:
        specs = kv_specs(model.config)
        windows, groups = group_layers(specs)
        device_blocks = (DEVICE_BLOCKS,) * len(windows)
        return DraftModel(
            model.programs(beside.plan),
            allocate(specs, groups, device_blocks, beside.plan.block_size, jnp.dtype(jnp.float32), {}),
            beside.plan,
            beside.builder,
            beside.sampler,
            hidden_size=model.config.hidden_size,
            dtype=jnp.dtype(jnp.float32),
            max_model_len=MAX_MODEL_LEN,
        )

    return make


@dataclass(frozen=True, eq=False)
class TinyModel:
    """A model whose engines share compiled programs as long as their compile plans are equal.

    Make it with ``tiny_model``. The KV pool belongs to the engine, so engines do not see each other.
    """

    config: TransformerConfig
    ops: Ops
    parts: SegmentedModel
    params: dict[str, jax.Array]
    layout: Layout = ONE_DEVICE
    _programs: dict[CompilePlan, ModelPrograms] = field(default_factory=dict)

    def engine(
        self,
        settings: EngineConfig | None = None,
        *,
        wrap: Callable[[JaxRunner], Runner] = lambda runner: runner,
        all_buckets: bool = False,
        tokenizer: Tokenizer | None = None,
        cache_dtype: str = "float32",
        scales: LayerScales | None = None,
        drafter: "MakeDrafter | None" = None,
        one_bucket: bool = False,
        connector: Callable[[BlockLayout], KVConnector] | None = None,
    ) -> Engine:
        """A fresh engine; by default with warm-up at first use.

        Args:
            wrap: puts something around the runner, for example a recorder.
            cache_dtype, scales: of the KV cache.
            drafter: makes one that computes beside the model.
            one_bucket: every step is padded to the most tokens that the settings allow.
            connector: makes what connects the engine with others; it is not started.
            all_buckets: the plan that the settings ask for, not one of few shapes that compiles quickly.
        """
        settings = settings or tiny_settings()
        assert settings.cache.num_blocks is not None
        assert settings.cache.num_blocks <= DEVICE_BLOCKS
        windows, groups = group_layers(kv_specs(self.config))
        drafts = settings.speculative.draft_limits
        plan = CompilePlan.make(
            settings.scheduler,
            MAX_MODEL_LEN,
            settings.cache.block_size,
            len(windows),
            draft_limits=drafts,
            tree_nodes=settings.speculative.tree_nodes,
        )
        if not all_buckets:
            assert plan.max_num_seqs <= MAX_SEQS
            assert plan.token_buckets[-1] <= MAX_TOKENS
            plan = replace(
                plan,
                max_num_seqs=MAX_SEQS,
                token_buckets=(plan.token_buckets[0], 8, MAX_TOKENS),
                row_buckets=(MAX_SEQS + drafts[1],),
                scored_rows=MAX_SEQS,
                copied_blocks=8 * len(windows),
            )
        if one_bucket:
            plan = replace(plan, token_buckets=(settings.scheduler.max_num_batched_tokens,))
        device_blocks = (DEVICE_BLOCKS,) * len(windows)
        stored = storage_dtype(jnp.dtype(CACHE_DTYPES[cache_dtype]), self.ops.platform)

        sampler = DeviceSampler(
            self.config.vocab_size, plan, self.config.eos_token_ids, self.ops.truncated_draw, self.layout
        )
        programs, builder = self.programs(plan), BatchBuilder(plan)
        follower = None
        if drafter is not None:
            follower = drafter(Beside(self, plan, programs, builder, sampler))
        specs = kv_specs(self.config)
        heads = tuple(spec.num_kv_heads for spec in specs)
        blocks = BlockLayout(
            heads, tuple(s.widths for s in specs), groups, windows, plan.block_size, jnp.dtype(stored).name
        )
        runner = JaxRunner(
            programs,
            allocate(specs, groups, device_blocks, plan.block_size, stored, scales or {}, self.layout),
            plan,
            sampler,
            hidden_size=self.config.hidden_size,
            dtype=jnp.float32,
            follower=follower,
            layout=self.layout,
            transfers=None if connector is None else BlockTransfers.make(groups, heads, self.layout),
        )
        return assemble(
            settings,
            wrap(runner),
            plan,
            (settings.cache.num_blocks,) * len(windows),
            windows,
            builder=builder,
            drafter=follower,
            tokenizer=tokenizer,
            chat_template=ChatTemplate({}),
            vocab_size=self.config.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=self.config.eos_token_ids,
            connector=None if connector is None else connector(blocks),
        )

    def programs(self, plan: CompilePlan) -> ModelPrograms:
        if plan not in self._programs:
            _, groups = group_layers(kv_specs(self.config))
            self._programs[plan] = ModelPrograms(
                self.parts, self.params, StepFunctions.make(self.parts, plan, groups, self.layout)
            )
        return self._programs[plan]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float64 logits [T, V] of a dense forward without any cache."""
        return dense_logits(
            self.config, {k: np.asarray(v, np.float64) for k, v in self.params.items()}, token_ids
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next tokens by the dense forward; asserts that none of them is a close call."""
        ids = list(prompt)
        for _ in range(count):
            last_V = self.logits(ids)[-1]
            top2 = np.sort(last_V)[-2:]
            assert top2[1] - top2[0] > MIN_GAP, (
                f"top-1 gap {top2[1] - top2[0]:.1e} behind {ids}: take another prompt"
            )
            ids.append(int(last_V.argmax()))
        return ids[len(prompt) :]


@cache
def tiny_model(windows: Windows = FULL, seed: int = 0) -> TinyModel:
    """Two layers, hidden size 64, 8 query heads, 2 KV heads, vocabulary 320.

    Args:
        windows: sliding window of each layer.
    """
    return make_model(replace(parse_config(_HF_CONFIG), windows=windows), seed)


@cache
def sparse_model(layout: Layout = ONE_DEVICE) -> TinyModel:
    """As ``tiny_model``, with four experts in every layer, of which a token takes two, and norms of q and k."""
    sparse = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return make_model(parse_config({**_HF_CONFIG, **sparse}), 0, layout)


def make_model(
    config: TransformerConfig, seed: int, layout: Layout = ONE_DEVICE, layers_per_segment: int = 1
) -> TinyModel:
    """A model of two layers; the weights do not depend on the layout."""
    build = partial(
        segmented_model,
        config,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        max_model_len=MAX_MODEL_LEN,
        layers_per_segment=layers_per_segment,
    )
    ops = kernel_ops()
    parts = build(ops)
    rng = np.random.default_rng(seed)
    host = {path: random_param(rng, path, shape.shape) for path, shape in parts.shapes.items()}
    if layout.num_devices > 1:
        ops = replace(ops, shards=layout.rules)
        parts = build(ops)
    params = {path: layout.place(weight, parts.axes[path]) for path, weight in host.items()}
    return TinyModel(config, ops, parts, params, layout)


def tiny_settings(**options: Any) -> EngineConfig:
    """Few shape buckets, so that the tests spend their time on running; ``options`` as in ``engines.config``."""
    values: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_TOKENS, **options}
    settings = engines.config(**values)  # type: ignore[arg-type]
    return settings.model_copy(update={"compile": settings.compile.model_copy(update={"warm_up": "lazy"})})


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random ordinary tokens."""
    return np.random.default_rng(1000 + seed).integers(3, 256, length).tolist()


def random_param(rng: np.random.Generator, path: str, shape: Iterable[int]) -> np.ndarray:
    """Weights that keep activations near 1, by the kind of parameter."""
    shape = tuple(shape)
    if len(shape) == 1:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    scale = {"embed": 1.0, "lm_head": 0.4}.get(path.split(".")[0], 1.5 * shape[-1] ** -0.5)
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def dense_logits(
    config: TransformerConfig, params: dict[str, np.ndarray], token_ids: Sequence[int]
) -> np.ndarray:
    """Forward of a plain Llama over whole sequences, with masks instead of a cache: logits [T, V]."""
    T = len(token_ids)
    H, K, h = config.num_heads, config.num_kv_heads, config.head_dim
    x_TD = params["embed.weight"][list(token_ids)]
    angle_Ti = np.arange(T)[:, None] * config.ropes[0].theta ** -(np.arange(0, h, 2) / h)
    distance_TT = np.arange(T)[:, None] - np.arange(T)[None, :]
    for layer, window in enumerate(config.windows):

        def weight(name: str, layer: int = layer) -> np.ndarray:
            return params[f"layers.{layer}.{name}.weight"]

        qkv_TAh = (_norm(x_TD, weight("input_norm")) @ weight("attention.qkv").T).reshape(T, H + 2 * K, h)
        q_THh, k_TKh = _rotate(qkv_TAh[:, :H], angle_Ti), _rotate(qkv_TAh[:, H : H + K], angle_Ti)
        k_THh, v_THh = (np.repeat(x, H // K, axis=1) for x in (k_TKh, qkv_TAh[:, H + K :]))
        s_HTT = np.einsum("thd,shd->hts", q_THh, k_THh) * config.query_scale
        seen_TT = (distance_TT >= 0) & (distance_TT < (window or T + 1))
        s_HTT = np.where(seen_TT, s_HTT, -np.inf)
        p_HTT = np.exp(s_HTT - s_HTT.max(-1, keepdims=True))
        p_HTT /= p_HTT.sum(-1, keepdims=True)
        out_TD = np.einsum("hts,shd->thd", p_HTT, v_THh).reshape(T, H * h)
        x_TD = x_TD + out_TD @ weight("attention.output").T
        gate_TF, up_TF = np.split(_norm(x_TD, weight("mlp_norm")) @ weight("mlp.gate_up").T, 2, axis=1)
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weight("mlp.down").T
    return _norm(x_TD, params["final_norm.weight"]) @ params["lm_head.weight"].T


def _norm(x_TD: np.ndarray, weight_D: np.ndarray) -> np.ndarray:
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * weight_D


def _rotate(x_TXh: np.ndarray, angle_Ti: np.ndarray) -> np.ndarray:
    cos, sin = np.cos(angle_Ti)[:, None], np.sin(angle_Ti)[:, None]
    first, second = np.split(x_TXh, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
