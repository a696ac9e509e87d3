"""Engines with every kind of drafter, whose target says what a table says: for ``verify-spec``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.checkpoints.loader import Param
from jaxinfer.config import (
    CacheConfig,
    CompileConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from jaxinfer.engine.build import Engine, assemble
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.kv_cache.layout import KVCache, LayerKVSpec
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.registry import parse_config
from jaxinfer.models.segments import SegmentedModel, segmented_model
from jaxinfer.runner.block_copies import PoolCopies
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.jax_runner import JaxRunner
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.speculative.draft_model import DraftModel
from jaxinfer.speculative.head_drafter import HeadDrafter
from jaxinfer.speculative.head_entries import LoadedHead
from jaxinfer.speculative.heads.config import parse_eagle, parse_eagle3, parse_medusa
from jaxinfer.speculative.heads.head import Method
from jaxinfer.speculative.heads.loading import HeadConfig, make_head
from jaxinfer.speculative.heads.programs import HeadFunctions, HeadLeaves
from jaxinfer.speculative.trees.dynamic import TreeShape
from jaxinfer.tokenization.chat import ChatTemplate
from pallas_kernels.select import select_ops

VOCAB, WIDTH, LAYERS = 8, 32, 2
SEQS, DRAFTS, BLOCKS, BLOCK_SIZE, CONTEXT = 16, 6, 128, 4, 32
SHAPE = TreeShape(3, 3)
FLOAT = jnp.dtype(jnp.float32)

_LAYER = {
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rope_theta": 1000.0,
}
_TARGET = {
    **_LAYER,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Kind:
    """A drafter: its configuration, and the head that it is, if it is one."""

    speculative: SpeculativeConfig
    method: Method | None = None

    @property
    def drafts(self) -> str:
        return "tree" if self.speculative.trees else "chain"


def _config(drafter: str, trees: bool = False, **more: object) -> SpeculativeConfig:
    named = {"model": "-"} if drafter in ("model", "head") else {}
    shape = {"tree_depth": SHAPE.depth, "tree_top_k": SHAPE.width}
    limits = {"max_drafts": DRAFTS, "max_step_drafts": DRAFTS * SEQS}
    return SpeculativeConfig.model_validate(
        {"drafter": drafter, "trees": trees, **shape, **limits, **named, **more}
    )


def _heads() -> Iterator[tuple[str, Kind]]:
    methods: tuple[Method, ...] = ("medusa", "eagle", "eagle3")
    for method in methods:
        for trees in (False, True):
            yield f"{method}, {'tree' if trees else 'chain'}", Kind(_config("head", trees), method)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "n-gram": Kind(_config("ngram", ngram_shortest=1)),
        "suffix": Kind(_config("suffix", suffix_shortest=1, suffix_longest=4)),
        "draft model": Kind(_config("model")),
        **dict(_heads()),
    }
)
"""Every built-in drafter; those that draft chains only have no trees."""


class TinyTarget:
    """The target of all kinds, and what is compiled for it. Its attention and MLP add nothing.

    Args:
        seed: of all weights.
    """

    def __init__(self, seed: int) -> None:
        self.config: TransformerConfig = parse_config(_TARGET)
        self.ops = select_ops("auto", "cpu", strict=False)
        self.parts: SegmentedModel = segmented_model(
            self.config, self.ops, FLOAT, param_dtype=FLOAT, max_model_len=CONTEXT, layers_per_segment=1
        )
        self._seed = seed
        self._functions: dict[CompilePlan, StepFunctions] = {}

    def _weights(self, noise: float = 0.0) -> dict[str, np.ndarray]:
        """Weights; with noise, those of a model that says something similar."""
        rng, other = np.random.default_rng(self._seed), np.random.default_rng(self._seed + 1)
        found = {}
        for path, struct in self.parts.shapes.items():
            silent = path.endswith(("attention.output.weight", "mlp.down.weight"))
            scale = 0.0 if silent else struct.shape[-1] ** -0.5
            flat = len(struct.shape) == 1
            weight = np.ones(struct.shape) if flat else scale * rng.normal(size=struct.shape)
            if path.startswith("embed"):
                weight = WIDTH**0.5 * (weight + noise * scale * other.normal(size=struct.shape))
            found[path] = (1.5 * weight if path.startswith("lm_head") else weight).astype(np.float32)
        return found

    def logits(self) -> np.ndarray:
        """What it says after each token, [V, V], by its tables alone."""
        params = {path: np.asarray(weight, np.float64) for path, weight in self._weights().items()}
        x_VD = params["embed.weight"]
        x_VD = x_VD / np.sqrt((x_VD**2).mean(-1, keepdims=True) + 1e-5) * params["final_norm.weight"]
        return x_VD @ params["lm_head.weight"].T

    def programs(self, plan: CompilePlan, noise: float = 0.0) -> ModelPrograms:
        if plan not in self._functions:
            self._functions[plan] = StepFunctions.make(self.parts, plan, (0,) * LAYERS)
        params: dict[str, Param] = {path: jnp.asarray(w) for path, w in self._weights(noise).items()}
        return ModelPrograms(self.parts, params, self._functions[plan])

    def engine(self, kind: Kind) -> Engine:
        config = EngineConfig(
            model=ModelConfig(reference="-"),
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=BLOCKS),
            scheduler=SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=SEQS * (1 + DRAFTS)),
            compile=CompileConfig(cache_dir="none", warm_up="lazy"),
            speculative=kind.speculative,
        )
        limits = kind.speculative.draft_limits
        nodes = kind.speculative.tree_nodes
        plan = CompilePlan.make(
            config.scheduler, CONTEXT, BLOCK_SIZE, 1, draft_limits=limits, tree_nodes=nodes
        )
        # One size of everything: it is compiled quickly, and what is computed costs next to nothing.
        plan = replace(plan, token_buckets=plan.token_buckets[-1:], row_buckets=plan.row_buckets[-1:])
        sampler = DeviceSampler(VOCAB, plan, (), self.ops.truncated_draw)
        programs, builder = self.programs(plan), BatchBuilder(plan)
        drafter = self._drafter(kind, plan, programs, builder, sampler)
        runner = JaxRunner(
            programs,
            _pools(kv_specs(self.config)),
            plan,
            sampler,
            hidden_size=WIDTH,
            dtype=FLOAT,
            follower=drafter,
        )
        return assemble(
            config,
            runner,
            plan,
            (BLOCKS,),
            (None,),
            builder=builder,
            drafter=drafter,
            tokenizer=None,
            chat_template=ChatTemplate({}),
            vocab_size=VOCAB,
            max_model_len=CONTEXT,
            eos_token_ids=(),
        )

    def _drafter(
        self,
        kind: Kind,
        plan: CompilePlan,
        programs: ModelPrograms,
        builder: BatchBuilder,
        sampler: DeviceSampler,
    ) -> DraftModel | HeadDrafter | None:
        if kind.speculative.drafter == "model":
            model, pools = self.programs(plan, noise=0.5), _pools(kv_specs(self.config))
            return DraftModel(
                model, pools, plan, builder, sampler, hidden_size=WIDTH, dtype=FLOAT, max_model_len=CONTEXT
            )
        if kind.method is None:
            return None
        config = _head_config(kind.method, self.config)
        head = make_head(kind.method, config, None, self.ops, FLOAT, param_dtype=FLOAT, max_model_len=CONTEXT)
        rng = np.random.default_rng(self._seed)
        leaves = tuple(
            jnp.asarray(rng.normal(size=s.shape) * s.shape[-1] ** -0.5 + (len(s.shape) == 1), s.dtype)
            for s in head.shapes.values()
        )
        loaded = LoadedHead(
            head,
            HeadFunctions.make(head, self.parts, plan),
            HeadLeaves(leaves, programs.embed_leaves, programs.head_leaves),
            _pools(head.kv_specs),
            PoolCopies.make((0,) * len(head.kv_specs)),
        )
        return HeadDrafter(
            loaded,
            plan,
            builder,
            sampler,
            num_layers=LAYERS,
            hidden_size=WIDTH,
            dtype=FLOAT,
            trees=SHAPE if kind.speculative.trees else None,
        )


def _head_config(method: Method, target: TransformerConfig) -> HeadConfig:
    if method == "medusa":
        return parse_medusa({"medusa_num_heads": 3, "medusa_num_layers": 1}, target)
    return parse_eagle(_LAYER, target) if method == "eagle" else parse_eagle3(_LAYER, target)


def _pools(specs: tuple[LayerKVSpec, ...]) -> KVCache:
    return allocate(specs, (0,) * len(specs), (BLOCKS,), BLOCK_SIZE, FLOAT, {})
