"""Penalties and the state between steps: complete histories, slot reuse, updates in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SLOTS, Row, decode, make_inputs

from jaxinfer.sampling.device import sample
from jaxinfer.sampling.state import HISTORY_CHUNK, history_chunks, init_state, reset_slot
from tests.pallas_kernels.hlo_checks import compiled

VOCAB = 320
BUCKET = 8

reset_jit = jax.jit(reset_slot, donate_argnums=0)


def load(state, slot: int, prompt: list[int], output: list[int]):
    for chunk in history_chunks(prompt, output):
        state = reset_jit(state, slot, *chunk)
    return state


def static_logits() -> np.ndarray:
    logits_V = np.full(VOCAB, -5.0, np.float32)
    logits_V[[5, 7, 6]] = 2.0, 1.9, 1.5
    return logits_V


def reference(row: Row, prompt: list[int], steps: int) -> list[int]:
    """Ten-line penalty reference: repetition on prompt and output, the others on the output."""
    output: list[int] = []
    for _ in range(steps):
        x = static_logits().astype(np.float64)
        for token in set(prompt + output):
            x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
        for token in set(output):
            x[token] -= row.presence + row.frequency * output.count(token)
        output.append(int(x.argmax()))
    return output


PENALTIES = [
    (Row(repetition=2.0), [7, 5, 5, 5]),
    (Row(presence=1.0), [5, 7, 6, 5]),
    (Row(frequency=0.3), [5, 7, 5, 7]),
]


@pytest.mark.parametrize(("row", "expected"), PENALTIES)
@pytest.mark.parametrize("situation", ["fresh", "reused slot", "resumed after two"])
def test_smp_07_penalties_see_the_complete_history(row: Row, expected: list[int], situation: str) -> None:
    """The newest token counts at once; another request's counts never do; a resumed request gets its own back."""
    prompt = [5, 5, 6]
    assert reference(row, prompt, 4) == expected
    state = init_state(SLOTS, VOCAB)
    if situation == "reused slot":
        state = load(state, 0, [7, 7, 5], [6, 6, 5, 7])
    state = load(state, 0, prompt, expected[:2] if situation == "resumed after two" else [])
    steps = 2 if situation == "resumed after two" else 4
    tokens, state, _ = decode(static_logits()[None], [row], state, steps, BUCKET)
    assert tokens[0] == expected[4 - steps :]
    assert int(state.newest_W[0]) == expected[-1]
    counts_V = np.asarray(state.output_counts_WV[0])
    assert counts_V.tolist() == np.bincount(expected, minlength=VOCAB).tolist()


def test_history_longer_than_a_chunk() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 2 * HISTORY_CHUNK + 1).tolist()
    output = rng.integers(0, 20, HISTORY_CHUNK).tolist()
    state = load(init_state(2, VOCAB), 1, [319], [319])
    state = load(state, 1, prompt, output)
    assert np.asarray(state.prompt_seen_WV[1]).tolist() == np.isin(np.arange(VOCAB), prompt).tolist()
    assert np.asarray(state.output_counts_WV[1]).tolist() == np.bincount(output, minlength=VOCAB).tolist()
    assert int(state.newest_W[1]) == output[-1]
    assert not np.asarray(state.output_counts_WV[0]).any()
    state = load(state, 1, [4], [])
    assert not np.asarray(state.output_counts_WV[1]).any()
    assert np.flatnonzero(np.asarray(state.prompt_seen_WV[1])).tolist() == [4]


def test_padding_writes_to_the_spare_slot_only() -> None:
    state = init_state(SLOTS, VOCAB)
    _, state, _ = decode(np.zeros((1, VOCAB), np.float32), [Row()], state, 2, BUCKET)
    # The helper gives padding the slot after the rows.
    assert np.asarray(state.output_counts_WV[2:]).sum() == 0
    assert int(state.output_counts_WV[0, 0]) == 2


def test_the_state_is_updated_in_place() -> None:
    """No instruction copies the [W, V] arrays when the state is donated."""
    vocab = 1280
    state = init_state(SLOTS, vocab)
    logits_PV = jnp.zeros((BUCKET, vocab), jnp.float32)
    sampler = jax.jit(sample, donate_argnums=2).lower(logits_PV, make_inputs([Row()] * BUCKET, vocab), state)
    zeros_X = np.zeros(HISTORY_CHUNK, np.int32)
    one = np.asarray(1, np.int32)
    reset = reset_jit.lower(state, one, zeros_X, one, zeros_X, one, np.asarray(True))
    for program in (sampler, reset):
        hlo = compiled(program).as_text()
        assert f"[{SLOTS + 1},{vocab}]" in hlo
        copies = re.findall(rf"(?:s32|pred)\[{SLOTS + 1},{vocab}\]\S* copy\(", hlo)
        assert copies == []
    entry = compiled(sampler).as_text().split("ENTRY")[1]
    assert not re.search(
        rf"f32\[{BUCKET},{vocab}\]\S* copy\(", entry
    )  # nor the logits, when all rows are greedy
