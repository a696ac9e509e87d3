"""Bans that depend on the tokens before, and constraints together."""

import numpy as np
import pytest

from jaxinfer.sampling.masks import allow_only, unpack
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.choose import ConstraintMaker
from jaxinfer.structured.constraint import AllOf, Constraint, TokenRules, everything
from tests.structured.automata import compiled
from tests.support.tokenizers import ByteTokenizer

VOCAB = 320
EOS = (257, 258)
MAKER = ConstraintMaker(ByteTokenizer(literals=("<think>", "</think>")), VOCAB, EOS, jump_ahead=True)
AB, BC = (65, 66), (66, 67, 67)


def tokens(constraint: Constraint) -> list[int]:
    return np.flatnonzero(unpack(constraint.next_mask(), VOCAB)).tolist()


def banned(constraint: Constraint) -> set[int]:
    return set(range(VOCAB)) - set(tokens(constraint))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320])
def test_everything_ends_with_the_vocabulary(vocab):
    assert np.array_equal(everything(vocab), allow_only(range(vocab), vocab))


def test_bad_words_are_banned_where_they_would_be_complete():
    rules = TokenRules(VOCAB, None, ((64,), AB, BC), (), 0, ends_alone=False)
    assert banned(rules) == {64}
    expected = [(65, {66}), (66, set()), (67, {67}), (66, set()), (67, {67}), (68, set())]
    for token, more in expected:
        assert rules.accept(token)
        assert banned(rules) == {64} | more


def test_end_tokens_are_banned_until_there_are_enough_tokens():
    rules = TokenRules(VOCAB, range(250, 260), (), EOS, 2, ends_alone=False)
    assert tokens(rules) == [*range(250, 257), 259]
    rules.accept(250)
    rules.accept(250)
    assert tokens(rules) == list(range(250, 260))


def test_masks_are_intersected_and_nothing_is_forced():
    grammar = compiled(choice=["AB", "AC"])
    both = AllOf([grammar.start(jump=True), TokenRules(VOCAB, None, (AB,), (), 0, ends_alone=True)])
    assert tokens(both) == [65]
    assert both.accept(65)
    assert tokens(both) == [67]
    assert both.forced() == []
    assert not both.complete
    assert both.accept(67)
    assert both.complete
    assert both.may_end


@pytest.mark.parametrize(
    ("params", "bad_words", "kind"),
    [
        ({}, (), None),
        ({"allowed_token_ids": [1], "min_tokens": 3}, ((5,),), None),
        ({}, (AB,), "TokenRules"),
        ({"thinking_token_budget": 3}, (), "Reasoning"),
        ({"thinking_token_budget": 3, "min_tokens": 1}, (), "AllOf"),
    ],
)
def test_only_requests_that_need_it_have_a_constraint(params, bad_words, kind):
    made = MAKER.make(SamplingParams(**params), [1, 2], bad_words, None)
    assert (None if made is None else type(made).__name__) == kind


def test_a_form_from_the_first_token_on_leaves_no_room_for_reasoning():
    params = SamplingParams(structured_outputs={"choice": ["A"]}, thinking_token_budget=3)
    made = MAKER.make(params, [1, 2], (), compiled(choice=["A"]))
    assert made is not None
    assert tokens(made) == [65]


@pytest.mark.parametrize(
    ("params", "jumps"),
    [
        ({}, True),
        ({"temperature": 0, "seed": 3, "stop": ["x"]}, True),
        ({"logit_bias": {65: 5}}, True),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.5}, False),
        ({"min_tokens": 2}, False),
        ({"allowed_token_ids": [65]}, False),
    ],
)
def test_who_jumps_ahead(params, jumps):
    grammar = compiled(choice=["ABC"])
    form = {"structured_outputs": {"choice": ["ABC"]}}
    made = MAKER.make(SamplingParams(**form, **params), [1], (), grammar)
    assert made is not None
    assert made.forced() == ([65, 66, 67] if jumps else [])
    off = ConstraintMaker(MAKER.tokenizer, VOCAB, EOS, jump_ahead=False)
    never = off.make(SamplingParams(**form, **params), [1], (), grammar)
    assert never is not None
    assert never.forced() == []
