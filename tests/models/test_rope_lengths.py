"""Length-dependent ropes end to end: the result does not depend on how a sequence is cut or batched."""

import numpy as np
import pytest
from model_driver import Chunk, ModelDriver, read_checkpoint
from tiny_checkpoints import prompt, reference_logits, save

LENGTH = 64
TOLERANCE = 2e-4
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "factor": 6.0, "rope_theta": 1000.0},
}


@pytest.fixture(scope="module", params=ROPES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"max_position_embeddings": 32, "rope_parameters": ROPES[request.param]}
    model = save("llama", folder, **changes)
    return model, ModelDriver(*read_checkpoint(folder), max_model_len=LENGTH), folder


def test_lod_05_one_piece_equals_transformers(case):
    """At the served length the frequencies, and so all logits, are those of the reference for that length."""
    model, driver, _ = case
    tokens = prompt(LENGTH)
    actual = driver.step([Chunk(0, 0, tokens)], LENGTH)
    np.testing.assert_allclose(actual, reference_logits(model, tokens), atol=TOLERANCE)


def test_lod_05_independent_of_chunks_batch_mates_and_hits(case):
    """Pinned: the base belongs to ``max_model_len``, so cached keys never disagree with later queries."""
    _, driver, _ = case
    tokens, other = prompt(50, seed=1), prompt(10, seed=2)
    driver.reset()
    whole = driver.step([Chunk(0, 0, tokens)], LENGTH)

    driver.reset()
    chunks = [driver.step([Chunk(0, i, tokens[i : i + 4])], LENGTH) for i in range(0, 50, 4)]
    np.testing.assert_allclose(np.concatenate(chunks), whole, atol=TOLERANCE)

    # A short request leaves 8 tokens in the cache; the long one starts behind them, next to another sequence.
    driver.reset()
    hit = driver.step([Chunk(0, 0, tokens[:8])], LENGTH)
    both = driver.step([Chunk(1, 0, other), Chunk(0, 8, tokens[8:])], LENGTH)
    np.testing.assert_allclose(np.concatenate([hit, both[10:]]), whole, atol=TOLERANCE)

    driver.reset()
    singles = [driver.step([Chunk(2, i, tokens[i : i + 1])], 2) for i in range(20)]
    np.testing.assert_allclose(np.concatenate(singles), whole[:20], atol=TOLERANCE)


@pytest.mark.parametrize("length", [8, 31, 32])
def test_lod_05_short_service_equals_transformers(case, length):
    """Served up to the original length, dynamic is plain rope, and linear divides positions at any length."""
    model, _, folder = case
    driver = ModelDriver(*read_checkpoint(folder), max_model_len=32)
    tokens = prompt(length)
    actual = driver.step([Chunk(0, 0, tokens)], 32)
    np.testing.assert_allclose(actual, reference_logits(model, tokens), atol=TOLERANCE)


def test_longrope_long_factors_equal_transformers(tmp_path):
    """Pinned: served beyond the original length, the long factors hold from the first token on."""
    model = save("phi3_longrope_partial", tmp_path)
    driver = ModelDriver(*read_checkpoint(tmp_path), max_model_len=LENGTH)
    tokens = prompt(40)
    whole = driver.step([Chunk(0, 0, tokens)], LENGTH)
    np.testing.assert_allclose(whole, reference_logits(model, tokens), atol=TOLERANCE)
    driver.reset()
    chunks = [driver.step([Chunk(0, i, tokens[i : i + 8])], LENGTH) for i in range(0, 40, 8)]
    np.testing.assert_allclose(np.concatenate(chunks), whole, atol=TOLERANCE)
