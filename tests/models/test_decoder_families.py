"""Every family against ``transformers``: logits of all positions, however the prompt is cut."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from model_driver import Chunk, ModelDriver, read_checkpoint
from tiny_checkpoints import CASES, SERVED_LENGTH, prompt, reference_logits, save

PADDED = 24
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Subject:
    driver: ModelDriver
    model: torch.nn.Module


@pytest.fixture(scope="module", params=CASES)
def subject(request, tmp_path_factory) -> Subject:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(request.param, folder)
    return Subject(ModelDriver(*read_checkpoint(folder), SERVED_LENGTH.get(request.param)), model)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 0.3, "logits are too flat for a meaningful comparison"
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def run(driver: ModelDriver, tokens: tuple[int, ...], cuts: list[int], padded: int) -> np.ndarray:
    driver.reset()
    edges = [0, *np.cumsum(cuts).tolist()]
    assert edges[-1] == len(tokens)
    pieces = [Chunk(1, a, tokens[a:b]) for a, b in pairwise(edges)]
    return np.concatenate([driver.step([piece], padded) for piece in pieces])


def test_whole_prefill(subject):
    tokens = prompt(19)
    close(run(subject.driver, tokens, [19], PADDED), reference_logits(subject.model, tokens))


def test_chunked_prefill(subject):
    tokens = prompt(19, seed=1)
    close(run(subject.driver, tokens, [5, 1, 7, 6], PADDED), reference_logits(subject.model, tokens))


def test_token_by_token(subject):
    tokens = prompt(11, seed=2)
    close(run(subject.driver, tokens, [1] * 11, PADDED), reference_logits(subject.model, tokens))


def test_two_sequences_in_a_ragged_batch(subject):
    long, short = prompt(17, seed=3), prompt(4, seed=4)
    driver = subject.driver
    driver.reset()
    first = driver.step([Chunk(0, 0, long[:14]), Chunk(2, 0, short[:3])], PADDED)
    second = driver.step([Chunk(2, 3, short[3:]), Chunk(0, 14, long[14:])], PADDED)
    close(np.concatenate([first[:14], second[1:]]), reference_logits(subject.model, long))
    close(np.concatenate([first[14:], second[:1]]), reference_logits(subject.model, short))
