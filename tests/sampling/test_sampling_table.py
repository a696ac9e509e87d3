"""The host's table: neutral rows, constraints, and inputs that mean what the parameters say."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SLOTS, sample_jit

from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.masks import (
    allow_all,
    allow_only,
    bad_word_sequences,
    ban,
    completions,
    is_empty,
    num_words,
    unpack,
)
from jaxinfer.sampling.state import init_state
from jaxinfer.sampling_params import SamplingParams

VOCAB = 320
EOS = (257, 258)


def build(table: SamplingTable, slots: list[int], positions: list[int], bucket: int = 8, masks=None):
    return table.build(np.array(slots), np.array(positions), bucket, masks)


def run(
    table: SamplingTable,
    slots: list[int],
    positions: list[int],
    logits_V: np.ndarray | None = None,
    **options,
):
    logits_V = np.zeros(VOCAB, np.float32) if logits_V is None else logits_V
    inputs = build(table, slots, positions, **options)
    output, _ = sample_jit(jnp.asarray(np.tile(logits_V, (8, 1))), inputs, init_state(SLOTS, VOCAB))
    return np.asarray(output.token_P)[: len(slots)].tolist()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320])
def test_masks_pack_and_unpack(vocab: int) -> None:
    ids = list(range(0, vocab, 3))
    mask_X = allow_only(ids, vocab)
    assert mask_X.shape == (num_words(vocab),)
    assert np.flatnonzero(unpack(mask_X, vocab)).tolist() == ids
    assert unpack(allow_all(vocab), vocab).all()
    ban(mask_X, ids)
    assert is_empty(mask_X, vocab)
    full_X = allow_all(vocab)
    ban(full_X, range(vocab))
    assert is_empty(full_X, vocab)
    assert not is_empty(allow_only([vocab - 1], vocab), vocab)


def test_bad_words_complete_after_their_beginning() -> None:
    sequences = bad_word_sequences(["cat", " dog"], lambda text: [ord(c) for c in text])
    assert sequences == ((99, 97, 116), (32, 99, 97, 116), (100, 111, 103), (32, 100, 111, 103))
    assert completions(sequences, [99, 97]) == [116]
    assert completions(sequences, [32, 99, 97]) == [116, 116]
    assert completions(sequences, [97]) == []
    assert completions(((5,),), []) == [5]


def test_plain_rows_share_the_large_arrays() -> None:
    table = SamplingTable(8, VOCAB)
    table.set(0, SamplingParams(), (1, 2), 3)
    first, second = build(table, [0], [3]), build(table, [0], [4])
    for name in ("allowed_PX", "bias_ids_PB", "bias_values_PB", "named_ids_PX"):
        assert vars(first)[name] is vars(second)[name]
    assert bool(first.any_random)
    flags = ("any_penalty", "any_mask", "any_bias", "any_truncation", "any_logprobs", "any_named")
    assert not any(bool(vars(first)[name]) for name in flags)
    assert np.asarray(first.slot_P).tolist() == [0] + [8] * 7
    assert np.asarray(first.temperature_P)[1:].tolist() == [0.0] * 7


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 9e-6}, {"top_p": 0}, {"top_k": 1}])
def test_smp_04_spellings_of_greedy(params: dict) -> None:
    """A greedy row needs no branch of the sampler; ties go to the lowest id."""
    table = SamplingTable(8, VOCAB)
    table.set(2, SamplingParams(**params), (1, 2), 3)
    inputs = build(table, [2], [3])
    assert not bool(inputs.any_random)
    assert not bool(inputs.any_truncation)
    assert run(table, [2], [3]) == [0]


@pytest.mark.parametrize("top_k", [None, -1, 0, VOCAB, VOCAB + 5])
def test_smp_04_spellings_of_no_top_k(top_k: int | None) -> None:
    table = SamplingTable(8, VOCAB)
    table.set(0, SamplingParams(temperature=1.5), (1, 2), 3)
    table.set(1, SamplingParams(temperature=1.5, top_k=top_k, top_p=1.0, min_p=0.0), (1, 2), 3)
    table.set(2, SamplingParams(temperature=1.5, top_k=1), (1, 2), 3)
    for position in range(3, 11):
        absent, given, greedy = run(table, [0, 1, 2], [position] * 3)
        assert absent == given
        assert greedy == 0
    assert not bool(build(table, [0, 1], [3, 3]).any_truncation)


def test_min_tokens_bans_end_tokens_until_enough_exist() -> None:
    """Pinned: min_tokens=2 bans EOS and stop ids for two output tokens; with ignore_eos only the stop ids."""
    table = SamplingTable(8, VOCAB)
    greedy = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5])
    table.set(0, greedy, (0, 0), 10, EOS)
    table.set(
        1, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5], ignore_eos=True), (0, 0), 10, EOS
    )
    logits_V = np.zeros(VOCAB, np.float32)
    logits_V[[257, 258, 5, 9]] = 4, 3, 2, 1
    assert run(table, [0, 1], [10, 10], logits_V) == [9, 257]
    assert run(table, [0, 1], [11, 11], logits_V) == [9, 257]
    assert run(table, [0, 1], [12, 12], logits_V) == [257, 257]
    assert not bool(build(table, [0, 1], [12, 12]).any_mask)


def test_all_constraints_are_combined() -> None:
    table = SamplingTable(8, VOCAB)
    params = SamplingParams(temperature=0, allowed_token_ids=[1, 2, 3, 4, 257], min_tokens=5, bad_words=["x"])
    table.set(3, params, (0, 0), 10, EOS, bad_words=((1,), (2, 3)))
    for position, allowed in ((10, [2, 3, 4]), (15, [2, 3, 4, 257])):
        mask_X = table.allowed(3, position)
        assert mask_X is not None
        assert np.flatnonzero(unpack(mask_X, VOCAB)).tolist() == allowed
    assert run(table, [3], [10]) == [2]
    assert run(table, [3], [10], masks={0: allow_only([4], VOCAB)}) == [
        4
    ]  # a mask from outside replaces them


def test_a_cleared_slot_is_neutral() -> None:
    table = SamplingTable(8, VOCAB)
    params = SamplingParams(
        logit_bias={7: 50}, allowed_token_ids=[7], logprobs=2, logprob_token_ids=[3], presence_penalty=1
    )
    table.set(0, params, (5, 6), 3, EOS)
    used = build(table, [0], [3])
    assert bool(used.any_bias)
    assert np.asarray(used.named_ids_PX)[0, 0] == 3
    assert run(table, [0], [3]) == [7]
    table.clear(0)
    assert table.allowed(0, 3) is None
    assert not any(
        bool(value) for name, value in vars(build(table, [0], [3])).items() if name.startswith("any_")
    )


def test_sixty_four_plain_rows_are_cheap() -> None:
    """The target is 0.1 ms; the bound leaves room for a busy machine."""
    table = SamplingTable(64, 49152)
    for slot in range(64):
        table.set(slot, SamplingParams(top_p=0.9), (slot, 1), 5)
    slots, positions = np.arange(64), np.full(64, 9)
    table.build(slots, positions, 64)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        table.build(slots, positions, 64)
        times.append(time.perf_counter() - start)
    assert min(times) < 4e-4
