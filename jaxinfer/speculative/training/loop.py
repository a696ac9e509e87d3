"""The optimisation: steps, checkpoints, records. A killed run that is started again ends as if it had not been."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

from jaxinfer.models.segments import Leaves
from jaxinfer.speculative.training.acceptance import Acceptance, Evaluator
from jaxinfer.speculative.training.batches import TrainBatch, make_batch, train_order
from jaxinfer.speculative.training.checkpoints import restore_state, save_state
from jaxinfer.speculative.training.config import OptimizerOptions
from jaxinfer.speculative.training.features import SequenceFeatures
from jaxinfer.speculative.training.objective import Frozen, Objective, Scores

RECORDS = "metrics.jsonl"

Report = Callable[[int, float, Sequence[float]], None]
"""(steps done, loss, acceptance per position of the step)."""


@dataclass(frozen=True)
class TrainResult:
    """Attributes:
    leaves: parameters after the last step.
    loss: of the last step.
    """

    leaves: Leaves
    loss: float
    before: Acceptance
    after: Acceptance


def optimizer(options: OptimizerOptions) -> optax.GradientTransformation:
    """AdamW with clipping, linear warm-up and cosine decay to a tenth."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        options.learning_rate,
        min(options.warmup_steps, max(0, options.steps - 1)),
        options.steps,
        options.learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay),
    )


def train(
    objective: Objective,
    frozen: Frozen,
    leaves: Leaves,
    sequences: Sequence[SequenceFeatures],
    evaluate: Evaluator,
    options: OptimizerOptions,
    length: int,
    directory: Path,
    report: Report,
) -> TrainResult:
    """Trains a head, or goes on with the newest checkpoint in ``directory``.

    Args:
        leaves: initial parameters.
        length: n of the batches.
        directory: gets ``checkpoints/`` and ``metrics.jsonl``.
    """
    rule = optimizer(options)
    state: Any = (leaves, rule.init(leaves))
    restored = restore_state(directory / "checkpoints", state)
    first, state = (0, state) if restored is None else restored
    records = Records(directory / RECORDS, first)
    before = records.acceptance_at(0)
    if before is None:
        before = evaluate(state[0])
        records.add_acceptance(0, before)
    advance = jax.jit(partial(_advance, objective, rule), donate_argnums=(0,))
    loss = records.last_loss
    for step in range(first, options.steps):
        chosen = train_order(len(sequences), options.batch_sequences, options.seed, step)
        batch = make_batch([sequences[i] for i in chosen], options.batch_sequences, length)
        state, value, scores = advance(state, frozen, batch)
        loss, acceptance, done = float(value), scores.acceptance(), step + 1
        records.add({"step": done, "loss": loss, "train_acceptance": acceptance})
        report(done, loss, acceptance)
        if done % options.evaluate_every == 0 and done < options.steps:
            records.add_acceptance(done, evaluate(state[0]))
        if done % options.checkpoint_every == 0 or done == options.steps:
            save_state(directory / "checkpoints", done, state)
    after = records.acceptance_at(options.steps)
    if after is None:
        after = evaluate(state[0])
        records.add_acceptance(options.steps, after)
    return TrainResult(state[0], loss, before, after)


def _advance(
    objective: Objective, rule: optax.GradientTransformation, state: Any, frozen: Frozen, batch: TrainBatch
) -> tuple[Any, jax.Array, Scores]:
    leaves, rule_state = state
    (loss, scores), gradients = jax.value_and_grad(objective.loss, has_aux=True)(leaves, frozen, batch)
    updates, rule_state = rule.update(gradients, rule_state, leaves)
    return (optax.apply_updates(leaves, updates), rule_state), loss, scores


class Records:
    """What happened at each step, one JSON object a line.

    Args:
        steps: steps of the checkpoint that is gone on with; later records are of a future that did not happen.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path = path
        self._records = [r for r in read_records(path) if r["step"] <= steps]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in self._records))

    @property
    def last_loss(self) -> float:
        return next((r["loss"] for r in reversed(self._records) if "loss" in r), float("nan"))

    def add(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def add_acceptance(self, step: int, measured: Acceptance) -> None:
        self.add(
            {
                "step": step,
                "acceptance": list(measured.per_position),
                "mean_length": measured.mean_length,
                "places": measured.places,
            }
        )

    def acceptance_at(self, step: int) -> Acceptance | None:
        for r in self._records:
            if r["step"] == step and "mean_length" in r:
                return Acceptance(tuple(r["acceptance"]), r["mean_length"], r["places"])
        return None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that is cut is left out."""
    records: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records
