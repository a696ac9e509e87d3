"""The heads against a dense NumPy statement of their papers, from files in the published layouts."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.draft_heads import (
    VD,
    Chunk,
    D,
    HeadDriver,
    HeadFile,
    V,
    dense_layer,
    eagle3_file,
    eagle_file,
    load,
    medusa_file,
    rms,
    silu,
    vllm_medusa_file,
)

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTHS = (9, 6)


def sequences(width: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Features (with zeros for entry 0) and embeddings of two sequences."""
    rng = np.random.default_rng(1)
    features = [rng.standard_normal((n, width)).astype(np.float32) for n in LENGTHS]
    for rows in features:
        rows[0] = 0
    return features, [rng.standard_normal((n, D)).astype(np.float32) for n in LENGTHS]


def run_in_chunks(driver: HeadDriver, x: list[np.ndarray], embeddings: list[np.ndarray]) -> list[np.ndarray]:
    """Both sequences in four steps: chunks together, one alone, single entries."""
    steps = [
        [Chunk(0, 0, 5), Chunk(1, 0, 2)],
        [Chunk(1, 2, 5)],
        [Chunk(0, 5, 8), Chunk(1, 5, 6)],
        [Chunk(0, 8, 9)],
    ]
    rows: list[list[np.ndarray]] = [[], []]
    for chunks in steps:
        out = driver.step(chunks, x, embeddings)
        for chunk in chunks:
            count = chunk.stop - chunk.start
            rows[chunk.sequence].append(out[:count])
            out = out[count:]
    return [np.concatenate(parts) for parts in rows]


def no_target(hidden: object) -> jnp.ndarray:
    raise AssertionError("this head has an output of its own")


@pytest.mark.parametrize(
    "file",
    [
        eagle3_file(),
        eagle3_file(prefix="model.", layer="layers.0."),
        eagle3_file(norm_before_residual=True, draft_vocab=V),
    ],
    ids=["published", "vllm", "norm_before_residual"],
)
def test_eagle3(file: HeadFile, tmp_path: Path) -> None:
    head, leaves = load(file.write(tmp_path))
    assert (head.method, head.feature_layers, head.num_heads) == ("eagle3", (2, 4, 5), 1)
    features, embeddings = sequences(3 * D)
    w = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): value
        for name, value in file.tensors.items()
    }
    x = [np.array(head.fuse(leaves, jnp.asarray(rows))) for rows in features]
    outputs = run_in_chunks(HeadDriver(head, leaves), x, embeddings)
    for rows, embedding, out in zip(features, embeddings, outputs):
        fused = rows.astype(np.float64) @ w["fc.weight"].T
        normed = rms(fused, w["midlayer.hidden_norm.weight"])
        embedded = rms(embedding.astype(np.float64), w["midlayer.input_layernorm.weight"])
        residual = normed if file.config.get("norm_before_residual") else fused
        wanted = dense_layer(w, "midlayer.", np.concatenate([embedded, normed], -1), residual)
        np.testing.assert_allclose(out, wanted, **TOLERANCE)
        logits = np.array(head.logits(leaves, no_target, jnp.asarray(out)))[:, 0]
        np.testing.assert_allclose(logits, rms(wanted, w["norm.weight"]) @ w["lm_head.weight"].T, **TOLERANCE)
    if head.draft_vocab_size == V:
        assert head.vocab_map is None
    else:
        assert head.vocab_map is not None
        assert head.vocab_map.dtype == np.int32
        np.testing.assert_array_equal(head.vocab_map, np.flatnonzero(w["t2d"]))
        np.testing.assert_array_equal(head.vocab_map, np.arange(VD) + w["d2t"])


@pytest.mark.parametrize(("layers", "bias"), [(1, True), (2, False)])
def test_eagle(layers: int, bias: bool, tmp_path: Path) -> None:
    file = eagle_file(layers=layers, bias=bias)
    w = file.tensors
    head, leaves = load(file.write(tmp_path))
    assert (head.method, head.feature_layers, head.vocab_map, head.embed) == ("eagle", (), None, None)
    features, embeddings = sequences(D)
    outputs = run_in_chunks(HeadDriver(head, leaves), features, embeddings)
    for rows, embedding, out in zip(features, embeddings, outputs):
        joined = np.concatenate([embedding, rows], -1).astype(np.float64) @ w["fc.weight"].T
        joined = joined + w["fc.bias"] if bias else joined
        wanted = dense_layer(w, "layers.0.", joined, joined)
        if layers == 2:
            wanted = dense_layer(w, "layers.1.", rms(wanted, w["layers.1.input_layernorm.weight"]), wanted)
        np.testing.assert_allclose(out, wanted, **TOLERANCE)
        logits = np.array(head.logits(leaves, lambda x_PD: 2 * x_PD, jnp.asarray(out)))[:, 0]
        np.testing.assert_allclose(logits, 2 * wanted, **TOLERANCE)


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa(blocks: int, tmp_path: Path) -> None:
    file = medusa_file(blocks=blocks)
    w = file.tensors
    head, leaves = load(file.write(tmp_path))
    assert (head.method, head.num_heads, head.kv_specs, head.forward) == ("medusa", 3, (), None)
    feature = np.random.default_rng(2).standard_normal((4, D)).astype(np.float32)
    logits = np.array(head.logits(leaves, no_target, jnp.asarray(feature)))
    assert logits.shape == (4, 3, V)
    for k in range(3):
        x = feature.astype(np.float64)
        for j in range(blocks):
            x = x + silu(x @ w[f"{k}.{j}.linear.weight"].T + w[f"{k}.{j}.linear.bias"])
        np.testing.assert_allclose(logits[:, k], x @ w[f"{k}.{blocks}.weight"].T, **TOLERANCE)


def test_medusa_of_part_of_the_vocabulary(tmp_path: Path) -> None:
    file = vllm_medusa_file()
    w = file.tensors
    head, leaves = load(file.write(tmp_path))
    assert head.vocab_map is not None
    np.testing.assert_array_equal(head.vocab_map, w["token_map"])
    feature = np.random.default_rng(2).standard_normal((4, D)).astype(np.float32)
    logits = np.array(head.logits(leaves, no_target, jnp.asarray(feature)))
    for k in range(2):
        x = feature + silu(feature.astype(np.float64) @ w[f"blocks.{k}.layers.0.weight"].T)
        np.testing.assert_allclose(logits[:, k], x @ w[f"lm_heads.{k}.weight"].T, **TOLERANCE)


def test_medusa_with_the_targets_output(tmp_path: Path) -> None:
    file = vllm_medusa_file(shared=True)
    head, leaves = load(file.write(tmp_path))
    feature = np.random.default_rng(2).standard_normal((4, D)).astype(np.float32)
    logits = np.array(head.logits(leaves, lambda x_PD: 2 * x_PD, jnp.asarray(feature)))
    for k in range(2):
        x = feature + silu(feature.astype(np.float64) @ file.tensors[f"blocks.{k}.layers.0.weight"].T)
        np.testing.assert_allclose(logits[:, k], 2 * x, **TOLERANCE)


def test_an_embedding_in_the_file_is_the_heads_own(tmp_path: Path) -> None:
    file = eagle_file(embedding=True)
    head, leaves = load(file.write(tmp_path))
    assert head.embed is not None
    ids = jnp.array([3, 0, 63])
    np.testing.assert_allclose(head.embed(leaves, ids), file.tensors["embed_tokens.weight"][[3, 0, 63]])
