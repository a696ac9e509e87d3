"""Trees of drafts: what is kept, in which order, and who sees whom."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.drafts import ROOT, Drafts, ancestor_words
from jaxinfer.speculative.lossy import longest_accepted_path, lossy_typical_acceptance
from jaxinfer.speculative.trees.cartesian import CartesianTree, best_choices
from jaxinfer.speculative.trees.dynamic import (
    NO_TOKEN,
    Candidates,
    frontier,
    grow,
    rerank,
    start,
    top,
    trees_of,
)

B, X, DEPTH, R, V = 3, 3, 3, 2, 7
QUICK_RERANK = jax.jit(rerank, static_argnums=1)
QUICK_TOP = jax.jit(top, static_argnums=1)
QUICK_GROW = jax.jit(grow)
QUICK_FRONTIER = jax.jit(frontier, static_argnums=1, static_argnames="of")


def laws(seed: int) -> np.ndarray:
    """Log-probabilities of the next token behind each path of up to DEPTH tokens, by a table: ``[paths, V]``."""
    logits = np.random.default_rng(seed).normal(scale=2, size=(V**DEPTH, V)).astype(np.float32)
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


def path_index(path: tuple[int, ...]) -> int:
    """The row of a path; different for different paths up to the size of the table."""
    index = 0
    for token in path:
        index = (index * V + token + 1) % V**DEPTH
    return index


def drafted(tables: list[np.ndarray]) -> tuple[Candidates, list[list[tuple[int, ...]]]]:
    """The candidates of a draft loop over one table per sequence, and the path of each candidate."""
    rows = jnp.asarray(np.stack([table[path_index(())] for table in tables]))
    candidates = start(*QUICK_TOP(rows, X))
    of = X
    for _ in range(DEPTH - 1):
        index_RB = QUICK_FRONTIER(candidates, B, of=of)
        paths = paths_of(candidates)
        law_RBV = np.stack(
            [
                np.stack([table[path_index(path[i])] for i in row])
                for table, path, row in zip(tables, paths, np.asarray(index_RB))
            ]
        )
        candidates = QUICK_GROW(candidates, index_RB, *QUICK_TOP(jnp.asarray(law_RBV), X))
        of = B * X
    return candidates, paths_of(candidates)


def paths_of(candidates: Candidates) -> list[list[tuple[int, ...]]]:
    result = []
    for tokens, parents in zip(np.asarray(candidates.token_RC), np.asarray(candidates.parent_RC)):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents):
            paths.append((*(() if parent == ROOT else paths[parent]), int(token)))
        result.append(paths)
    return result


def paths_in(tree: Drafts) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[j] for j in tree.path(i)) for i in range(len(tree))}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 5, 12]), st.integers(0, 12))
def test_the_most_probable_candidates_are_kept(seed: int, size: int, limit: int) -> None:
    tables = [laws(seed), laws(seed + 1)]
    candidates, paths = drafted(tables)
    limits = (size, limit)
    trees = trees_of(QUICK_RERANK(candidates, size, jnp.array(limits)))
    for tree, table, row, bound in zip(trees, tables, paths, limits):
        assert len(tree) == min(bound, size)
        score = {
            path: sum(float(table[path_index(path[:i])][path[i]]) for i in range(len(path))) for path in row
        }
        assert len(score) == len(row), "each candidate has its own path"
        best = sorted(score.values(), reverse=True)[: len(tree)]
        kept = paths_in(tree)
        assert len(kept) == len(tree)
        np.testing.assert_allclose(sorted((score[path] for path in kept), reverse=True), best, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_frontier_is_the_best_of_the_last_depth(seed: int) -> None:
    tables = [laws(seed), laws(seed + 1)]
    candidates, _ = drafted(tables)
    score_RC = np.asarray(candidates.score_RC)
    assert score_RC.shape == (R, X + (DEPTH - 1) * B * X)
    index_RB = np.asarray(frontier(candidates, B, of=B * X))
    for row, index in zip(score_RC, index_RB):
        assert (index >= len(row) - B * X).all()
        np.testing.assert_array_equal(row[index], np.sort(row[-B * X :])[::-1][:B])


def test_ties_and_rounding_keep_parents() -> None:
    candidates = start(jnp.array([[5, 6]]), jnp.array([[-2.0, -1.0]]))
    for index, token in ((1, 7), (2, 8)):  # behind a token of probability 1, which was rounded to more
        candidates = grow(candidates, jnp.array([[index]]), jnp.array([[[token]]]), jnp.array([[[1e-6]]]))
    (tree,) = trees_of(rerank(candidates, 3))
    assert tree == Drafts((6, 7, 8), (ROOT, 0, 1))


def test_candidates_that_may_not_be_used_are_left_out() -> None:
    candidates = Candidates(
        jnp.array([[5, 6, 7]]), jnp.array([[ROOT, ROOT, 0]]), jnp.array([[-jnp.inf, -1.0, -jnp.inf]])
    )
    reranked = rerank(candidates, 3)
    assert trees_of(reranked) == [Drafts((6,), (ROOT,))]
    np.testing.assert_array_equal(reranked.token_RN, [[6, NO_TOKEN, NO_TOKEN]])


def test_top_translates_draft_ids() -> None:
    token, value = top(jnp.log(jnp.array([[0.2, 0.7, 0.1]])), 2, jnp.array([10, 20, 30]))
    np.testing.assert_array_equal(token, [[20, 10]])
    np.testing.assert_allclose(np.exp(value), [[0.7, 0.2]], rtol=1e-5)


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(ROOT, i - 1)) for i in range(draw(st.integers(0, 70)))]


@given(parent_lists())
def test_ancestors_are_the_path_and_the_root(parents: list[int]) -> None:
    tree = Drafts(tuple(range(len(parents))), tuple(parents))
    words = ancestor_words(parents)
    assert words.dtype == np.int32
    assert words.shape == (len(parents) + 1, len(parents) // 32 + 1)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(np.flatnonzero(bits[0]), [0])
    for i in range(len(parents)):
        np.testing.assert_array_equal(np.flatnonzero(bits[i + 1]), [0, *(j + 1 for j in tree.path(i))])
        assert tree.depths[i] == len(tree.path(i))
    assert ancestor_words(parents, 4).shape[1] == 4


def test_a_mask_too_narrow_is_refused() -> None:
    with pytest.raises(ValueError, match="40 tokens need 2 words"):
        ancestor_words([ROOT] * 39, 1)


@given(parent_lists(), st.integers(0, 6))
def test_a_cut_tree_keeps_its_paths(parents: list[int], depth: int) -> None:
    tree = Drafts(tuple(range(len(parents))), tuple(parents))
    assert paths_in(tree.up_to_depth(depth)) == {path for path in paths_in(tree) if len(path) <= depth}


def test_cartesian_tree_of_choices() -> None:
    shape = CartesianTree.make([[0], [0, 0], [1], [0, 1], [0, 0, 2]])
    assert (shape.num_heads, shape.num_ranks) == (3, 3)
    tree = shape.fill(np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]]))
    assert paths_in(tree) == {(10,), (11,), (10, 20), (10, 21), (10, 20, 32)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0, 0]], r"\[0, 0\] lacks its parent \[0\]"),
        ([[0], [0]], "named twice"),
        ([[]], "no node of a tree"),
        ([[-1]], "no node of a tree"),
    ],
)
def test_wrong_choices_are_refused(choices: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CartesianTree.make(choices)


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_best_choices_have_the_largest_products(seed: int, size: int) -> None:
    heads = np.sort(np.random.default_rng(seed).uniform(size=(3, 3)), axis=1)[:, ::-1]
    product = {
        choice: float(np.prod([heads[k, rank] for k, rank in enumerate(choice)]))
        for depth in (1, 2, 3)
        for choice in itertools.product(range(3), repeat=depth)
    }
    choices = best_choices(heads, size)
    CartesianTree.make(choices)  # they are a tree
    np.testing.assert_allclose(
        [product[choice] for choice in choices], sorted(product.values(), reverse=True)[:size], rtol=1e-9
    )


def test_typical_acceptance_by_hand() -> None:
    law = jnp.array([[0.5, 0.25, 0.25, 0.0], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]])
    # exp(-H) is 2**-1.5 for the first law, about 0.85 for the second, 1/4 for the third.
    accepted = lossy_typical_acceptance(
        jnp.repeat(law, 4, axis=0), jnp.tile(jnp.arange(4), 3), epsilon=0.3, delta=0.3
    )
    np.testing.assert_array_equal(np.asarray(accepted).reshape(3, 4)[0], [True, True, True, False])
    np.testing.assert_array_equal(np.asarray(accepted).reshape(3, 4)[1], [True, False, False, False])
    assert np.asarray(accepted).reshape(3, 4)[2].all()


def test_longest_accepted_path() -> None:
    tree = Drafts((1, 2, 3, 4, 5), (ROOT, ROOT, 0, 1, 3))
    assert longest_accepted_path(tree, [True] * 5) == (1, 3, 4)
    assert longest_accepted_path(tree, [True, True, True, False, True]) == (0, 2)
    assert longest_accepted_path(tree, [False] * 5) == ()
