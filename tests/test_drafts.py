"""Chains and trees of drafts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.drafts import NO_DRAFTS, Drafts

TREE = Drafts.tree([5, 6, 7, 5, 8, 9], [-1, -1, 0, 0, 1, 3])


@st.composite
def trees(draw: st.DrawFn) -> Drafts:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, node - 1))
        taken = {t for t, p in zip(tokens, parents) if p == parent}
        free = [t for t in range(13) if t not in taken]
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return Drafts.tree(tokens, parents)


def test_a_chain_is_a_tree_with_one_path():
    chain = Drafts.chain([4, 4, 7])
    assert chain.parents == (-1, 0, 1)
    assert chain.is_chain
    assert chain.depths == (1, 2, 3)
    assert NO_DRAFTS.is_chain
    assert not NO_DRAFTS
    assert not TREE.is_chain


def test_a_tree():
    assert TREE.depths == (1, 1, 2, 2, 2, 3)
    assert [TREE.path(node) for node in range(6)] == [(0,), (1,), (0, 2), (0, 3), (1, 4), (0, 3, 5)]
    assert TREE.up_to_depth(2) == Drafts((5, 6, 7, 5, 8), (-1, -1, 0, 0, 1))
    assert TREE.first(3) == Drafts((5, 6, 7), (-1, -1, 0))


def test_matching_follows_the_samples_behind_each_draft():
    assert TREE.matching([5, 5, 0, 0, 9, 0, 1]) == [0, 3, 5]
    assert TREE.matching([6, 5, 8, 0, 9, 0, 1]) == [1, 4]
    assert TREE.matching([9, 5, 8, 0, 9, 0, 1]) == []
    assert Drafts.chain([1, 2, 3]).matching([1, 2, 4, 9]) == [0, 1]


@given(trees(), st.lists(st.integers(0, 12), min_size=13, max_size=13))
def test_the_path_of_the_samples_is_the_path_of_the_tokens(tree, samples):
    path = tree.matching(samples)
    assert tree.along([tree.tokens[node] for node in path]) == path
    assert [tree.depths[node] for node in path] == list(range(1, len(path) + 1))
    emitted = [samples[0], *(samples[1 + node] for node in path)]
    assert tree.along(emitted) == path


@given(trees(), st.integers(0, 13), st.integers(0, 13))
def test_cuts_keep_whole_paths(tree, count, depth):
    cut = tree.first(count).up_to_depth(depth)
    assert cut == Drafts.tree(cut.tokens, cut.parents)
    assert max(cut.depths, default=0) <= depth
    assert len(cut) <= count


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1], "2 tokens and 1 parents"),
        ([1, 2], [-1, 1], "draft 1 has parent 1; allowed: -1 to 0"),
        ([1, 2], [-2, 0], "draft 0 has parent -2"),
        ([1, 1], [-1, -1], "same token twice"),
    ],
)
def test_a_wrong_tree_is_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        Drafts.tree(tokens, parents)
