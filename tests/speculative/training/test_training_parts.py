"""The parts of a training run: hidden states, the dense forward, files, and what is counted."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.segments import segmented_model
from jaxinfer.speculative.heads.head import METHODS, DraftHead, Method
from jaxinfer.speculative.heads.loading import load_head, make_head, open_head
from jaxinfer.speculative.training.acceptance import Evaluator, walk
from jaxinfer.speculative.training.batches import TrainBatch, make_batch, train_order
from jaxinfer.speculative.training.config import HeadOptions, OptimizerOptions
from jaxinfer.speculative.training.dense_ops import DENSE_OPS
from jaxinfer.speculative.training.export import write_head
from jaxinfer.speculative.training.features import SequenceFeatures, TargetFeatures, read_shard, write_shard
from jaxinfer.speculative.training.initial import (
    frequent_tokens,
    initial_params,
    parsed_config,
    published_config,
)
from jaxinfer.speculative.training.loop import TrainResult, read_records, train
from jaxinfer.speculative.training.objective import Frozen, Objective
from jaxinfer.speculative.training.text import TextSequence, read_sequences, write_sequences
from tests.support.compiling import UNOPTIMIZED
from tests.support.draft_heads import (
    OPS,
    TARGET,
    Chunk,
    D,
    HeadDriver,
    V,
    eagle3_file,
    load,
    medusa_file,
)
from tests.support.tiny_models import tiny_model

LENGTH = 7


def sequence(length: int = LENGTH, width: int = 3 * D, prompt_len: int = 2) -> SequenceFeatures:
    rng = np.random.default_rng(4)
    return SequenceFeatures(
        rng.integers(0, V, length).astype(np.int32),
        prompt_len,
        rng.standard_normal((length, width)).astype(jnp.bfloat16),
        rng.standard_normal((length, D)).astype(jnp.bfloat16),
        rng.integers(0, V, length).astype(np.int32),
    )


def target_of(head: DraftHead, predictions: int) -> tuple[Objective, Frozen, np.ndarray]:
    """An objective on a random target, and the target's embedding."""
    parts = segmented_model(
        TARGET, OPS, jnp.float32, param_dtype=jnp.float32, max_model_len=64, layers_per_segment=8
    )
    rng = np.random.default_rng(6)
    params = {p: rng.standard_normal(s.shape).astype(np.float32) for p, s in parts.shapes.items()}
    head_leaves = tuple(jnp.asarray(params[path]) for path in parts.head_paths)
    draft_leaves = head_leaves
    if head.vocab_map is not None:
        draft_leaves = (*head_leaves[:-1], head_leaves[-1][head.vocab_map])
    embed = tuple(jnp.asarray(params[path]) for path in parts.embed_paths)
    return (
        Objective(head, parts, predictions),
        Frozen(embed, head_leaves, draft_leaves),
        params["embed.weight"],
    )


def dense(directory: Path) -> tuple[DraftHead, tuple[jax.Array, ...]]:
    """A head for training, and its leaves."""
    files = open_head(directory, TARGET)
    head = make_head(
        files.method,
        files.config,
        files.vocab_map,
        DENSE_OPS,
        jnp.float32,
        param_dtype=jnp.float32,
        max_model_len=64,
    )
    params = load_head(head, files, lambda _, array: jnp.asarray(array))
    return head, tuple(params[path] for path in head.paths)


def test_training_steps_are_the_drafting_steps_of_serving(tmp_path: Path) -> None:
    directory = eagle3_file().write(tmp_path)
    head, leaves = dense(directory)
    objective, frozen, embedding_VD = target_of(head, 3)
    text = sequence()
    batch = make_batch([text, sequence(5)], 2, LENGTH)
    predict = jax.jit(objective.predict, compiler_options=UNOPTIMIZED)
    _, hidden = predict(leaves, frozen, batch)
    trained = [np.asarray(rows).reshape(2, LENGTH, D)[0] for rows in hidden]

    served, served_leaves = load(directory)
    features = np.concatenate([np.zeros((1, 3 * D)), text.feature_nX[:-1].astype(np.float32)])
    x = np.array(served.fuse(served_leaves, jnp.asarray(features, jnp.float32)))
    embeddings = embedding_VD[text.token_ids]
    driver = HeadDriver(served, served_leaves)
    for place in range(LENGTH):
        out = driver.step([Chunk(0, place, place + 1)], [x], [embeddings])
        np.testing.assert_allclose(trained[0][place], out[0], atol=2e-5, rtol=1e-4)
        for step in range(1, min(3, LENGTH - place)):
            # Drafting: the head's own output is the feature of the next entry, behind the target's entries.
            drafted = np.concatenate([np.zeros((place + step, D)), out]).astype(np.float32)
            out = driver.step([Chunk(0, place + step, place + step + 1)], [drafted], [embeddings])
            np.testing.assert_allclose(trained[step][place], out[0], atol=2e-5, rtol=1e-4)


def test_a_prediction_depends_on_no_later_token(tmp_path: Path) -> None:
    head, leaves = dense(eagle3_file().write(tmp_path))
    objective, frozen, _ = target_of(head, 2)
    batch = make_batch([sequence()], 1, LENGTH)
    changed = TrainBatch(
        batch.token_ids_Bn.at[0, 5].add(1),
        batch.feature_BnX.at[0, 6].add(1),  # the feature of position 5
        batch.final_BnD,
        batch.greedy_Bn,
        batch.length_B,
        batch.prompt_len_B,
    )
    predict = jax.jit(objective.predict, compiler_options=UNOPTIMIZED)
    (first, second), _ = predict(leaves, frozen, batch)
    (first_changed, second_changed), _ = predict(leaves, frozen, changed)
    np.testing.assert_array_equal(first[:5], first_changed[:5])
    np.testing.assert_array_equal(second[:4], second_changed[:4])
    assert not np.array_equal(first[5], first_changed[5])
    assert not np.array_equal(second[4], second_changed[4])


def test_acceptance_counts_runs_behind_the_prompt(tmp_path: Path) -> None:
    head, leaves = dense(medusa_file(heads=2).write(tmp_path))
    objective, frozen, _ = target_of(head, 2)
    text = sequence(width=D)
    batch = make_batch([text], 1, LENGTH)
    logits, _ = jax.jit(objective.predict, compiler_options=UNOPTIMIZED)(leaves, frozen, batch)
    best = [np.asarray(rows).argmax(-1) for rows in logits]
    # The target says what head 1 says everywhere, and the text follows it; head 2 is then right by chance only.
    greedy = np.array(best[0])
    tokens = np.concatenate([[0], greedy[:-1]]).astype(np.int32)
    made = TrainBatch(
        jnp.asarray(tokens[None]),
        batch.feature_BnX,
        batch.final_BnD,
        jnp.asarray(greedy[None].astype(np.int32)),
        batch.length_B,
        batch.prompt_len_B,
    )
    accepted, scores = jax.jit(objective.accepted, compiler_options=UNOPTIMIZED)(leaves, frozen, made)
    second = [int(best[1][i] == greedy[i + 1]) if i + 1 < LENGTH else 0 for i in range(LENGTH)]
    np.testing.assert_array_equal(accepted[0], [0, 0, *(1 + s for s in second[2:])])
    np.testing.assert_array_equal(scores.judged_J, [5, 4])
    assert scores.acceptance()[0] == 1.0


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    head, leaves = dense(medusa_file(heads=2).write(tmp_path / "head"))
    objective, frozen, _ = target_of(head, 2)
    texts = [sequence(n, width=D) for n in (5, 6, 7)]
    options = OptimizerOptions(
        steps=6, batch_sequences=2, checkpoint_every=2, evaluate_every=3, warmup_steps=1, learning_rate=1e-2
    )
    evaluate = Evaluator(objective, frozen, texts[:1], 2, LENGTH)

    def run(name: str, stop_at: int | None = None) -> TrainResult:
        def report(done: int, loss: float, acceptance: Sequence[float]) -> None:
            if done == stop_at:
                raise KeyboardInterrupt

        start = jax.tree.map(jnp.copy, leaves)
        return train(objective, frozen, start, texts[1:], evaluate, options, LENGTH, tmp_path / name, report)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop_at=5)
    # What a kill in the middle of a write leaves behind.
    (tmp_path / "stopped" / "checkpoints" / "00000005.orbax-checkpoint-tmp").mkdir()
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    resumed = run("stopped")
    assert (resumed.loss, resumed.before, resumed.after) == (whole.loss, whole.before, whole.after)
    for leaf, other in zip(whole.leaves, resumed.leaves):
        np.testing.assert_array_equal(leaf, other)
    records = [read_records(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")]
    assert records[0] == records[1]
    losses = [r["loss"] for r in records[0] if "loss" in r]
    assert losses[-1] < losses[0]


def test_hidden_states_are_the_targets(tmp_path: Path) -> None:
    model = tiny_model()
    target = TargetFeatures(model.parts, model.params, (0, 1, 2), 24)
    texts = [
        TextSequence(tuple(np.random.default_rng(n).integers(3, 256, n).tolist()), 2) for n in (5, 24, 17)
    ]
    found = [s for part in target.passes(texts) for s in target.compute(part)]
    head_leaves = tuple(model.params[path] for path in model.parts.head_paths)
    D = model.config.hidden_size
    for text, features in zip(texts, found):
        logits = model.logits(text.token_ids)
        np.testing.assert_array_equal(features.greedy_n, logits.argmax(-1))
        made = model.parts.output(head_leaves, jnp.asarray(features.final_nD.astype(np.float32)))
        np.testing.assert_allclose(made, logits, atol=0.1)
        embedded = np.asarray(model.params["embed.weight"])[list(text.token_ids)]
        np.testing.assert_allclose(features.feature_nX[:, :D].astype(np.float32), embedded, rtol=1e-2)
        last = model.parts.final_norm(
            head_leaves, jnp.asarray(features.feature_nX[:, 2 * D :].astype(np.float32))
        )
        np.testing.assert_allclose(last, features.final_nD.astype(np.float32), atol=0.05)
    write_shard(tmp_path / "0.npz", found)
    for written, read in zip(found, read_shard(tmp_path / "0.npz"), strict=True):
        for name in ("token_ids", "feature_nX", "final_nD", "greedy_n"):
            np.testing.assert_array_equal(getattr(written, name), getattr(read, name))
        assert written.prompt_len == read.prompt_len


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_can_be_opened(method: Method, tmp_path: Path) -> None:
    options = HeadOptions(predictions=2, depth=2, draft_vocab_size=None if method == "eagle" else 20)
    hf = published_config(method, options, TARGET)
    config = parsed_config(method, hf, TARGET)
    counts = np.random.default_rng(0).permutation(V)
    vocab_map = frequent_tokens(counts, config.draft_vocab_size)
    sizes = {"param_dtype": jnp.float32, "max_model_len": 64}
    head = make_head(method, config, vocab_map, OPS, jnp.float32, **sizes)
    rows = len(counts) if vocab_map is None else len(vocab_map)
    start = initial_params(head, jnp.ones((rows, D)), jnp.ones((D,)), 0)
    params = {
        path: np.asarray(value) + np.random.default_rng(i).normal(size=value.shape).astype(np.float32)
        for i, (path, value) in enumerate(start.items())
    }
    write_head(tmp_path, method, hf, config, vocab_map, params, "float32")
    files = open_head(tmp_path, TARGET)
    assert files.method == method
    assert files.config == config
    np.testing.assert_array_equal(files.vocab_map, vocab_map)
    loaded = load_head(head, files, lambda _, array: jnp.asarray(array))
    for path, value in params.items():
        np.testing.assert_array_equal(loaded[path], value, err_msg=path)


def test_frequent_tokens() -> None:
    np.testing.assert_array_equal(frequent_tokens(np.array([0, 5, 0, 9, 1]), 4), [0, 1, 3, 4])
    assert frequent_tokens(np.array([1, 2]), 2) is None


def test_every_epoch_sees_every_sequence_once() -> None:
    seen = [i for step in range(6) for i in train_order(8, 4, 3, step)]
    assert all(sorted(seen[e * 8 : e * 8 + 8]) == list(range(8)) for e in range(3))
    assert seen[:8] != seen[8:16]


def test_walk() -> None:
    assert list(walk(np.array([9, 9, 1, 0, 0, 2, 0]), 2)) == [2, 1, 3]
    assert list(walk(np.array([0, 0]), 2)) == []


def test_a_text_that_was_cut_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    texts = [TextSequence((1, 2, 3), 1), TextSequence((4, 5), 2)]
    write_sequences(path, texts)
    path.write_text(path.read_text() + '{"token_ids": [7,')
    assert read_sequences(path) == texts
