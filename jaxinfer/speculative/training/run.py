"""A training run from recipe to head: text, hidden states, optimisation, files. Each part is done once and kept."""

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config_values import ConfigError
from jaxinfer.models.config import TransformerConfig
from jaxinfer.models.segments import SegmentedModel
from jaxinfer.speculative.heads.head import DraftHead, Method
from jaxinfer.speculative.heads.loading import HeadConfig, make_head
from jaxinfer.speculative.training.acceptance import Acceptance, Evaluator
from jaxinfer.speculative.training.config import TrainConfig
from jaxinfer.speculative.training.dense_ops import DENSE_OPS
from jaxinfer.speculative.training.export import write_head
from jaxinfer.speculative.training.features import (
    SequenceFeatures,
    TargetFeatures,
    bytes_per_token,
    read_shard,
    write_shard,
)
from jaxinfer.speculative.training.initial import (
    frequent_tokens,
    initial_params,
    parsed_config,
    published_config,
)
from jaxinfer.speculative.training.loop import RECORDS, TrainResult, read_records, train
from jaxinfer.speculative.training.objective import Frozen, Objective
from jaxinfer.speculative.training.plot import plot_run
from jaxinfer.speculative.training.text import (
    Answer,
    TextSequence,
    file_sequences,
    generate_sequences,
    read_sequences,
    write_sequences,
)
from jaxinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SHARD_TOKENS = 8192
WORK = "training"
Report = Callable[[str, int, int, str], None]
"""(part of the run, done, total, what is new)."""


@dataclass(frozen=True)
class TrainedHead:
    """The result of a run; ``directory`` can be given as ``speculative.drafter``."""

    directory: Path
    loss: float
    before: Acceptance
    after: Acceptance


@dataclass(frozen=True)
class Target:
    """The model that a head is trained for, as far as training needs it.

    Attributes:
        parts: in segments of one layer, so that the input of every layer can be read.
        load: reads the parameters, by path.
        tokenizer: None for a model without one.
        answer: lets the model answer prompts; the engine it needs lives no longer than the ``with`` block.
    """

    config: TransformerConfig
    parts: SegmentedModel
    max_model_len: int
    load: Callable[[], dict[str, jax.Array]]
    tokenizer: Tokenizer | None
    answer: Callable[[], AbstractContextManager[Answer]]


@dataclass(frozen=True)
class _Plan:
    """What a run works with."""

    method: Method
    recipe: TrainConfig
    work: Path
    target: Target
    hf: dict[str, Any]
    head_config: HeadConfig


def train_head(method: Method, recipe: TrainConfig, target: Target, report: Report) -> TrainedHead:
    """Trains a draft head for a model and writes it in its published layout.

    A run that was stopped goes on where it was: texts, hidden states and checkpoints are kept in
    ``<output.directory>/training``.

    Raises:
        ConfigError: the recipe does not fit the method or the model, or the directory holds a run of another recipe.
    """
    directory = Path(recipe.output.directory)
    hf = published_config(method, recipe.head, target.config)
    plan = _Plan(method, recipe, directory / WORK, target, hf, parsed_config(method, hf, target.config))
    _claim(plan)
    _write_text(plan, report)
    params = target.load()
    _write_features(plan, params, report)
    shards = [read_shard(path) for path in _shards(plan)]
    sequences = [sequence for shard in shards for sequence in shard]
    held_out, rest = split_held_out(sequences, recipe.data.held_out)
    vocab_map = _vocab_map(plan, rest)
    head = make_head(
        method,
        plan.head_config,
        vocab_map,
        DENSE_OPS,
        jnp.dtype(jnp.float32),
        param_dtype=jnp.dtype(jnp.float32),
        max_model_len=target.max_model_len,
    )
    result = _optimise(plan, head, params, held_out, rest, report)
    values = {path: np.asarray(leaf) for path, leaf in zip(head.paths, result.leaves)}
    write_head(directory, method, hf, plan.head_config, vocab_map, values, recipe.output.dtype)
    trained = TrainedHead(directory, result.loss, result.before, result.after)
    _write_report(plan, trained)
    return trained


def split_held_out(
    sequences: list[SequenceFeatures], share: float
) -> tuple[list[SequenceFeatures], list[SequenceFeatures]]:
    """Every so manieth of at least two sequences for measuring, and the rest for training; at least one of each."""
    every = max(2, round(1 / share))
    held_out = sequences[::every]
    return held_out, [s for i, s in enumerate(sequences) if i % every]


def _claim(plan: _Plan) -> None:
    """Notes the recipe in the directory, or checks that it is the one already there."""
    path = plan.work / "recipe.json"
    mine = {"method": plan.method, **plan.recipe.model_dump(mode="json")}
    if not path.is_file():
        plan.work.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=2))
        return
    theirs = json.loads(path.read_text())
    different = sorted(
        key for key in _flat(mine) | _flat(theirs) if _flat(mine).get(key) != _flat(theirs).get(key)
    )
    if different:
        raise ConfigError(
            f"{plan.work} holds a run of another recipe (it differs in {', '.join(different)}); "
            "name another output.directory, or delete that one"
        )


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _write_text(plan: _Plan, report: Report) -> None:
    path, data = plan.work / "text.jsonl", plan.recipe.data
    if (plan.work / "text.done").is_file():
        return
    if data.source == "file":
        if plan.target.tokenizer is None:
            raise ConfigError("data.source is file, but the model has no tokenizer")
        write_sequences(path, list(file_sequences(data, plan.target.tokenizer))[: data.max_sequences])
    else:
        with plan.target.answer() as answer:
            generate_sequences(
                data, answer, path, lambda done, total: report("generating text", done, total, "")
            )
    (plan.work / "text.done").touch()


def _usable_text(plan: _Plan) -> list[TextSequence]:
    """Sequences with something to learn, as many as the disk space allows."""
    sequences = [s for s in read_sequences(plan.work / "text.jsonl") if len(s.token_ids) > s.prompt_len + 1]
    D = plan.target.config.hidden_size
    room = plan.recipe.data.max_bytes // bytes_per_token(_feature_width(plan), D)
    kept: list[TextSequence] = []
    for sequence in sequences:
        room -= len(sequence.token_ids)
        if room < 0:
            logger.warning("data.max_bytes holds %d of %d sequences", len(kept), len(sequences))
            break
        kept.append(sequence)
    return kept


def _feature_layers(plan: _Plan) -> tuple[int, ...]:
    return tuple(plan.hf.get("eagle_aux_hidden_state_layer_ids", ()))


def _feature_width(plan: _Plan) -> int:
    return plan.target.config.hidden_size * max(1, len(_feature_layers(plan)))


def _shards(plan: _Plan) -> list[Path]:
    return sorted((plan.work / "features").glob("*.npz"))


def _write_features(plan: _Plan, params: dict[str, jax.Array], report: Report) -> None:
    """Hidden states of all text, a shard at a time; shards that are there are kept."""
    done = plan.work / "features.done"
    if done.is_file():
        return
    texts = _usable_text(plan)
    if len(texts) < 2:
        raise ConfigError(f"{len(texts)} sequences of text are too few: one to measure on, one to learn from")
    groups = _shard_texts(texts)
    target = TargetFeatures(
        plan.target.parts, params, _feature_layers(plan), plan.recipe.data.sequence_length
    )
    for index, group in enumerate(groups):
        report("hidden states", index, len(groups), "")
        path = plan.work / "features" / f"{index:05d}.npz"
        if not path.is_file():
            write_shard(path, [s for part in target.passes(group) for s in target.compute(part)])
    report("hidden states", len(groups), len(groups), "")
    done.touch()


def _shard_texts(sequences: list[TextSequence]) -> list[list[TextSequence]]:
    groups: list[list[TextSequence]] = [[]]
    tokens = 0
    for sequence in sequences:
        if groups[-1] and tokens + len(sequence.token_ids) > SHARD_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(sequence)
        tokens += len(sequence.token_ids)
    return groups


def _vocab_map(plan: _Plan, sequences: list[SequenceFeatures]) -> np.ndarray | None:
    counts_V = np.zeros(plan.target.config.vocab_size, np.int64)
    for sequence in sequences:
        np.add.at(counts_V, sequence.token_ids[sequence.prompt_len :], 1)
    counts_V[list(plan.target.config.eos_token_ids)] += 1
    return frequent_tokens(counts_V, plan.head_config.draft_vocab_size)


def _optimise(
    plan: _Plan,
    head: DraftHead,
    params: dict[str, jax.Array],
    held_out: list[SequenceFeatures],
    rest: list[SequenceFeatures],
    report: Report,
) -> TrainResult:
    model, options = plan.target.parts, plan.recipe.optimizer
    head_leaves = tuple(params[path].astype(jnp.float32) for path in model.head_paths)
    draft_leaves = _rows(head_leaves, head.vocab_map)
    objective = Objective(head, model, plan.recipe.head.predictions)
    frozen = Frozen(tuple(params[path] for path in model.embed_paths), head_leaves, draft_leaves)
    output_VD = draft_leaves[-1]
    norm_D = head_leaves[0] + plan.target.config.norm_offset
    initial = initial_params(head, output_VD, norm_D, options.seed)
    length = plan.recipe.data.sequence_length
    evaluator = Evaluator(objective, frozen, held_out, options.batch_sequences, length)

    def tell(done: int, loss: float, acceptance: Any) -> None:
        shown = " ".join(f"{value:.0%}" for value in acceptance)
        report("training", done, options.steps, f"loss {loss:.3f}  accepted {shown}")

    leaves = tuple(initial[path] for path in head.paths)
    return train(objective, frozen, leaves, rest, evaluator, options, length, plan.work, tell)


def _rows(head_leaves: tuple[jax.Array, ...], vocab_map: np.ndarray | None) -> tuple[jax.Array, ...]:
    """Leaves of the target's head with the rows of the draft vocabulary only; the output matrix is the last leaf."""
    if vocab_map is None:
        return head_leaves
    return *head_leaves[:-1], head_leaves[-1][vocab_map]


def _write_report(plan: _Plan, trained: TrainedHead) -> None:
    def entry(measured: Acceptance) -> dict[str, Any]:
        return {"per_position": measured.per_position, "mean_length": measured.mean_length}

    value = {
        "method": plan.method,
        "loss": trained.loss,
        "before": entry(trained.before),
        "after": entry(trained.after),
        "places": trained.after.places,
    }
    (plan.work / "report.json").write_text(json.dumps(value, indent=2))
    title = f"{plan.method} for {plan.recipe.model.reference}"
    plot_run(read_records(plan.work / RECORDS), plan.work / "curves.png", title)
