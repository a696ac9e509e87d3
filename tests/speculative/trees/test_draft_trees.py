"""Trees of drafts: what is kept, in which order, and who sees whom."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.drafts import ROOT, Drafts, ancestor_words
from jaxinfer.speculative.trees.cartesian import CartesianTree, best_choices
from jaxinfer.speculative.trees.dynamic import (
    NO_TOKEN,
    Candidates,
    Growing,
    TreeShape,
    grow,
    nothing_grown,
    rerank,
    top,
    trees_of,
)

B, DEPTH, R, V = 3, 3, 2, 7
SHAPE = TreeShape(DEPTH, B)
QUICK_RERANK = jax.jit(rerank, static_argnums=1)
QUICK_TOP = jax.jit(top, static_argnums=1)
QUICK_GROW = jax.jit(grow)


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


def drafted(tables: list[np.ndarray]) -> tuple[Growing, list[list[tuple[int, ...]]]]:
    """What a draft loop grows over one table per sequence, and the path of each candidate."""
    growing = nothing_grown(R, SHAPE, 1)
    for level in range(DEPTH):
        index_RB, paths = np.asarray(growing.frontier_RB), paths_of(growing.candidates)
        law_RBV = np.full((R, B, V), -np.inf, np.float32)
        for r, table in enumerate(tables):
            for b, index in enumerate(index_RB[r] if level else [ROOT]):
                law_RBV[r, b] = table[path_index(() if index == ROOT else paths[r][index])]
        token_RBX, logprob_RBX = QUICK_TOP(jnp.asarray(law_RBV), B)
        if level == 0:
            logprob_RBX = logprob_RBX.at[:, 1:].set(-jnp.inf)
        growing = QUICK_GROW(growing, token_RBX, logprob_RBX, jnp.int32(level))
    return growing, paths_of(growing.candidates)


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
    growing, paths = drafted(tables)
    limits = (size, limit)
    trees = trees_of(QUICK_RERANK(growing.candidates, size, jnp.array(limits)))
    usable_RC = np.isfinite(np.asarray(growing.candidates.score_RC))
    for r, (tree, table, bound) in enumerate(zip(trees, tables, limits)):
        row = list(itertools.compress(paths[r], usable_RC[r]))
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
def test_the_best_of_each_level_are_expanded(seed: int) -> None:
    tables = [laws(seed), laws(seed + 1)]
    growing, paths = drafted(tables)
    score_RC, tokens_RN = np.asarray(growing.candidates.score_RC), np.asarray(growing.token_RN)
    assert score_RC.shape == (R, SHAPE.candidates)
    bits = np.unpackbits(np.asarray(growing.words_RNU).view(np.uint8), axis=-1, bitorder="little")
    for r, row in enumerate(score_RC):
        nodes = paths_of_nodes(tokens_RN[r], np.asarray(growing.parent_RN)[r])
        for level in range(DEPTH):
            of_level = row[level * B * B : (level + 1) * B * B]
            best = [paths[r][level * B * B + i] for i in np.argsort(-of_level, kind="stable")[:B]]
            assert nodes[level * B : (level + 1) * B] == best
        for n, path in enumerate(nodes):
            seen = {0} | {1 + m for m, other in enumerate(nodes) if path[: len(other)] == other}
            assert set(np.flatnonzero(bits[r, n]).tolist()) == seen


def paths_of_nodes(tokens_N: np.ndarray, parents_N: np.ndarray) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens_N, parents_N):
        paths.append((*(() if parent == ROOT else paths[parent]), int(token)))
    return paths


def test_ties_and_rounding_keep_parents() -> None:
    growing = nothing_grown(1, TreeShape(3, 2), 1)
    behind = [([[5, 6], [0, 0]], [[-2.0, -1.0], [-jnp.inf, -jnp.inf]])]
    # Behind a token of probability 1, which was rounded to more.
    behind += [([[7, 0], [0, 0]], [[1e-6, -jnp.inf], [-jnp.inf, -jnp.inf]])]
    behind += [([[8, 0], [0, 0]], [[1e-6, -jnp.inf], [-jnp.inf, -jnp.inf]])]
    for level, (tokens, logprobs) in enumerate(behind):
        growing = grow(growing, jnp.array([tokens]), jnp.array([logprobs]), jnp.int32(level))
    (tree,) = trees_of(rerank(growing.candidates, 3))
    assert tree == Drafts((6, 7, 8), (ROOT, 0, 1))


def test_candidates_that_may_not_be_used_are_left_out() -> None:
    candidates = Candidates(
        jnp.array([[5, 6, 7]]), jnp.array([[ROOT, ROOT, 0]]), jnp.array([[-jnp.inf, -1.0, -jnp.inf]])
    )
    reranked = rerank(candidates, 3)
    assert trees_of(reranked) == [Drafts((6,), (ROOT,))]
    np.testing.assert_array_equal(reranked.token_RN, [[6, NO_TOKEN, NO_TOKEN]])


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
