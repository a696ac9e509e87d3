"""Drafters that compute beside the target: from a configuration to a draft model or a draft head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxinfer.batch.builder import BatchBuilder
from jaxinfer.checkpoints.loader import Param
from jaxinfer.checkpoints.references import resolve_reference
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.model_setup import (
    ModelSetup,
    MoreLayers,
    Progress,
    allocate_cache,
    load_weights,
    set_up_model,
)
from jaxinfer.kv_cache.allocate import allocate
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.decoder import kv_specs
from jaxinfer.models.segments import with_vocabulary
from jaxinfer.runner.block_copies import PoolCopies
from jaxinfer.runner.device_sampler import DeviceSampler
from jaxinfer.runner.programs import ModelPrograms, StepFunctions
from jaxinfer.speculative.draft_model import DraftModel
from jaxinfer.speculative.head_drafter import HeadDrafter
from jaxinfer.speculative.head_entries import LoadedHead
from jaxinfer.speculative.heads.head import DraftHead
from jaxinfer.speculative.heads.loading import HeadFiles, load_head, make_head, open_head
from jaxinfer.speculative.heads.programs import HeadFunctions, HeadLeaves
from jaxinfer.speculative.trees.dynamic import TreeShape
from jaxinfer.tokenization.loading import load_text
from jaxinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Surroundings:
    """What a drafter shares with its target.

    Attributes:
        num_blocks: of each KV group.
    """

    config: EngineConfig
    target: ModelSetup
    programs: ModelPrograms
    num_blocks: tuple[int, ...]
    builder: BatchBuilder
    sampler: DeviceSampler


class DraftSetup(Protocol):
    """A drafter that is opened and described, but not loaded."""

    @property
    def layers(self) -> MoreLayers: ...

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError if token ids mean something else than in the target's tokenizer."""
        ...

    def load(self, progress: Progress | None) -> dict[str, Param]: ...

    def make(self, params: dict[str, Param], around: Surroundings) -> DraftModel | HeadDrafter: ...


def set_up_drafter(config: EngineConfig, target: ModelSetup) -> DraftSetup | None:
    """The drafter of a configuration, if it is one that computes beside the target.

    Raises:
        CheckpointError, ValueError: it cannot be read, or does not fit the target.
    """
    reference = config.speculative.model
    if reference is None:
        return None
    if config.speculative.drafter == "head":
        return HeadSetup.open(config, target, open_head(resolve_reference(reference), target.model))
    return DraftModelSetup.open(config, target, reference)


def cuts_of(config: EngineConfig) -> Callable[[TransformerConfig], tuple[int, ...]] | None:
    """The layers whose inputs a draft head reads; None if there is no head."""
    reference = config.speculative.model
    if config.speculative.drafter != "head" or reference is None:
        return None
    path = resolve_reference(reference)
    return lambda target: open_head(path, target).feature_layers


@dataclass(frozen=True)
class DraftModelSetup:
    """A ``DraftSetup`` of a model of its own."""

    setup: ModelSetup

    @classmethod
    def open(cls, config: EngineConfig, target: ModelSetup, reference: str) -> "DraftModelSetup":
        named = ModelConfig(reference=reference, dtype=config.model.dtype, weights=config.model.weights)
        draft = set_up_model(config.model_copy(update={"model": named}), longest=target.max_model_len)
        if draft.windows != target.windows[: len(draft.windows)]:
            raise ValueError(
                f"speculative.model: the sliding windows of the draft model, {list(draft.windows)}, must be the "
                f"first of the target's, {list(target.windows)} (None is full attention)"
            )
        return cls(draft)

    @property
    def layers(self) -> MoreLayers:
        return MoreLayers(kv_specs(self.setup.model), self.setup.groups)

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_same_vocabulary(tokenizer, load_text(self.setup.files.tokenizer_path)[0])

    def load(self, progress: Progress | None) -> dict[str, Param]:
        return load_weights(self.setup, progress)

    def make(self, params: dict[str, Param], around: Surroundings) -> DraftModel:
        draft, plan = self.setup, around.target.plan
        parts = with_vocabulary(draft.parts, around.target.model.vocab_size)
        return DraftModel(
            ModelPrograms(parts, params, StepFunctions.make(parts, plan, draft.groups)),
            allocate_cache(around.config, draft, around.num_blocks),
            plan,
            around.builder,
            around.sampler,
            hidden_size=draft.model.hidden_size,
            dtype=draft.dtype,
            max_model_len=draft.max_model_len,
        )


@dataclass(frozen=True)
class HeadSetup:
    """A ``DraftSetup`` of a trained head."""

    files: HeadFiles
    head: DraftHead
    group: int

    @classmethod
    def open(cls, config: EngineConfig, target: ModelSetup, files: HeadFiles) -> "HeadSetup":
        head = make_head(
            files.method,
            files.config,
            files.vocab_map,
            target.ops,
            target.dtype,
            param_dtype=target.dtype,
            max_model_len=target.max_model_len,
        )
        if head.kv_specs and None not in target.windows:
            raise ValueError("speculative.model: an EAGLE head needs a target with a layer of full attention")
        width, rows = config.speculative.tree_top_k, target.plan.row_buckets[-1]
        if config.speculative.trees and head.forward is not None and width > min(rows, head.draft_vocab_size):
            raise ValueError(
                f"speculative.tree_top_k is {width}; at most the {rows} rows of scheduler.max_num_seqs and "
                f"speculative.max_step_drafts together, and the {head.draft_vocab_size} tokens that the head drafts"
            )
        return cls(files, head, 0)  # the group without a window is the first one

    @property
    def layers(self) -> MoreLayers:
        return MoreLayers(self.head.kv_specs, (self.group,) * len(self.head.kv_specs))

    def check(self, tokenizer: Tokenizer | None) -> None:
        """A head has no tokenizer; the sizes of its matrices were compared with the target's."""

    def load(self, progress: Progress | None) -> dict[str, Param]:
        return load_head(self.head, self.files, lambda _, weight: jax.device_put(weight))

    def make(self, params: dict[str, Param], around: Surroundings) -> HeadDrafter:
        target, programs, speculative = around.target, around.programs, around.config.speculative
        block_size = around.config.cache.block_size
        kv_cache = allocate(
            self.head.kv_specs, self.layers.groups, around.num_blocks, block_size, target.stored_dtype, {}
        )
        leaves = HeadLeaves(
            tuple(params[path] for path in self.head.paths), programs.embed_leaves, programs.head_leaves
        )
        functions = HeadFunctions.make(self.head, target.parts, target.plan)
        return HeadDrafter(
            LoadedHead(self.head, functions, leaves, kv_cache, PoolCopies.make(self.layers.groups)),
            target.plan,
            around.builder,
            around.sampler,
            num_layers=target.model.num_layers,
            hidden_size=target.model.hidden_size,
            dtype=target.dtype,
            trees=TreeShape(speculative.tree_depth, speculative.tree_top_k) if speculative.trees else None,
        )


def check_same_vocabulary(target: Tokenizer | None, draft: Tokenizer | None) -> None:
    """Checks that token ids mean the same to both models.

    Raises:
        ValueError: names the first difference.
    """
    if target is None or draft is None:
        return
    for token in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.token_str(token), draft.token_str(token)
        if ours != theirs:
            raise ValueError(
                f"speculative.model has another vocabulary: token {token} is {ours!r} in the target and {theirs!r} "
                "in the draft model"
            )
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"speculative.model has another vocabulary: the target's has {target.vocab_size} tokens, the draft "
            f"model's {draft.vocab_size}; the first {min(target.vocab_size, draft.vocab_size)} agree"
        )
