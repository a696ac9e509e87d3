"""The exact law of what verification emits, on a small vocabulary.

For given drafts, each trial has one number at which acceptance turns into rejection, and each draw from a residual law
has one at the end of each token. Between those the result is constant. So a run just below and just above each of them,
weighted with the lengths of the intervals, integrates the result exactly; and one on the wrong side shows in the law.
The intervals are computed here, in float64 and apart from the op.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import jax.numpy as jnp
import numpy as np

from pallas_kernels.sampling.reference import Draws, truncated_draw
from pallas_kernels.speculative_verify.reference import Verified
from tests.pallas_kernels.compiled import jitted

# The vocabulary is embedded in a larger one, and the batch is that of the other tests: one compiled op serves all.
V, VOCAB, ROWS, NODES, MAX_NODES = 4, 300, 32, 230, 9
TREES = {
    "chain": (-1, 0, 1),
    "two-children": (-1, 0, 0, 1),
    "bushy": (-1, 0, 0, 1, 1),
    "three-children": (-1, 0, 0, 0),
}
EDGE = 1e-3
BEFORE, AFTER = 2.0**-33, 1 - 2.0**-24


@dataclass(frozen=True)
class Truncation:
    """Sampling parameters of one side."""

    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0
    min_p: float = 0.0


# Of the target and of the draft.
LAWS = (
    (Truncation(), Truncation()),
    (Truncation(temperature=0.7, top_k=3), Truncation(top_p=0.95)),
    (Truncation(min_p=0.3), Truncation(temperature=1.5, top_k=3)),
    (Truncation(temperature=0.0), Truncation()),
)


@dataclass
class Model:
    """Laws after each token at each depth, from one table of logits; ``p_DVV[d, a]`` follows token a at depth d."""

    logits_DVV: np.ndarray
    way: Truncation
    p_DVV: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        logits_NV = self.logits_DVV.reshape(-1, V)
        padded_NV = np.full((NODES, VOCAB), -np.inf, np.float32)
        padded_NV[:, 0] = 0
        padded_NV[: len(logits_NV), :V] = logits_NV
        laws = sample(padded_NV, self.way)
        self.p_DVV = exact_probabilities(logits_NV, laws).reshape(self.logits_DVV.shape)


@dataclass(frozen=True)
class Run:
    """One row: its drafts, its share of the whole, its numbers, and the target's token at each node."""

    tokens: tuple[int, ...]
    weight: float
    accept: tuple[float, ...]
    residual: float
    draws: tuple[int, ...]


def sample(logits_NV: np.ndarray, way: Truncation) -> Draws:
    n = len(logits_NV)
    uniform_N, temperature_N, top_p_N, min_p_N = (
        jnp.full(n, value, jnp.float32) for value in (0.5, way.temperature, way.top_p, way.min_p)
    )
    return _sampled(logits_NV, uniform_N, temperature_N, jnp.full(n, way.top_k), top_p_N, min_p_N)


_sampled = jitted(truncated_draw)


def exact_probabilities(logits_NV: np.ndarray, laws: Draws) -> np.ndarray:
    """In float64, given the thresholds; of the first nodes, as many as there are logits."""
    logits_NV = logits_NV.astype(np.float64)
    n = len(logits_NV)
    temperature_N1 = np.asarray(laws.temperature_P, np.float64)[:n, None]
    greedy_NV = np.eye(VOCAB)[np.asarray(laws.token_P)[:n], : logits_NV.shape[1]]
    top_N1 = logits_NV.max(-1, keepdims=True)
    weight_NV = np.exp((logits_NV - top_N1) / np.where(temperature_N1 > 0, temperature_N1, 1.0))
    weight_NV[logits_NV < np.asarray(laws.threshold_P)[:n, None]] = 0
    return np.where(temperature_N1 > 0, weight_NV / weight_NV.sum(-1, keepdims=True), greedy_NV)


def check_law(
    op: Callable[..., Verified],
    parents: tuple[int, ...],
    law: tuple[Truncation, Truncation],
    sampled: bool,
    matching: bool = False,
) -> None:
    """Asserts that the next three tokens follow the target.

    Args:
        matching: the target's tokens at all nodes are drawn first, and deterministic drafts are held against them.
    """
    rng = np.random.default_rng(7)
    logits_DVV = rng.normal(size=(3, V, V)).astype(np.float32)
    target = Model(logits_DVV, law[0])
    draft = Model((logits_DVV + rng.normal(size=(3, V, V))).astype(np.float32), law[1])
    walks = matching_runs(parents, target, draft) if matching else all_runs(parents, target, draft, sampled)
    runs = list(walks)
    np.testing.assert_allclose(sum(run.weight for run in runs), 1, atol=1e-9)
    emitted = []
    for i in range(0, len(runs), ROWS):
        emitted += emit(op, runs[i : i + ROWS], parents, target, draft, sampled, matching)
    p_V, p_VV, p_VVV = target.p_DVV[0, 0], target.p_DVV[1], target.p_DVV[2]
    found_VVV = np.zeros((V, V, V))
    for run, (first, *later) in zip(runs, emitted):
        # A step that emits fewer tokens is followed by one whose tokens have the right law, by the same test.
        second_V = np.eye(V)[later[0]] if later else p_VV[first]
        third_VV = np.eye(V)[[later[1]] * V] if len(later) > 1 else p_VVV
        found_VVV[first] += run.weight * second_V[:, None] * third_VV
    np.testing.assert_allclose(found_VVV, p_V[:, None, None] * p_VV[:, :, None] * p_VVV, atol=1e-6)


def law_at(model: Model, node: int, parents: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    return model.p_DVV[depth_of(node, parents), tokens[node]]


def depth_of(node: int, parents: tuple[int, ...]) -> int:
    return 0 if node == 0 else 1 + depth_of(parents[node], parents)


def all_runs(parents: tuple[int, ...], target: Model, draft: Model, sampled: bool) -> Iterator[Run]:
    for tokens, weight in assignments(parents, (0,), 1.0, draft, sampled):
        for run in walk(0, parents, tokens, weight, (0.5,) * len(parents), target, draft, sampled):
            if run.weight > 0:
                yield run


def matching_runs(parents: tuple[int, ...], target: Model, draft: Model) -> Iterator[Run]:
    """Every combination of the target's tokens at the nodes."""
    for tokens, _ in assignments(parents, (0,), 1.0, draft, False):
        law_nV = [law_at(target, node, parents, tokens) for node in range(len(tokens))]
        for draws in product(range(V), repeat=len(tokens)):
            weight = float(np.prod([p_V[v] for p_V, v in zip(law_nV, draws)]))
            if weight > 0:
                yield Run(tokens, weight, (0.5,) * len(tokens), 0.5, draws)


def assignments(
    parents: tuple[int, ...], tokens: tuple[int, ...], weight: float, draft: Model, sampled: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Drafts and their probability: children without replacement. Deterministic ones are the likeliest tokens; a node
    whose parent has no token left for it ends the tree."""
    node = len(tokens)
    if node == len(parents):
        yield tokens, weight
        return
    q_V = law_at(draft, parents[node], parents, tokens).copy()
    q_V[[tokens[i] for i in range(1, node) if parents[i] == parents[node]]] = 0
    if q_V.sum() == 0:
        yield tokens, weight
    elif not sampled:
        yield from assignments(parents, (*tokens, int(q_V.argmax())), weight, draft, sampled)
    else:
        for token in np.flatnonzero(q_V):
            share = weight * q_V[token] / q_V.sum()
            yield from assignments(parents, (*tokens, int(token)), share, draft, sampled)


def walk(
    node: int,
    parents: tuple[int, ...],
    tokens: tuple[int, ...],
    weight: float,
    accept: tuple[float, ...],
    target: Model,
    draft: Model,
    sampled: bool,
) -> Iterator[Run]:
    """A run next to each edge of each interval, for what can follow at ``node``."""
    p_V = law_at(target, node, parents, tokens)
    q_V = law_at(draft, node, parents, tokens).copy()
    children = [i for i in range(1, len(tokens)) if parents[i] == node]
    for child in children:
        x = tokens[child]
        offer_V = q_V / q_V.sum() if sampled else np.eye(V)[x]
        edge = min(1.0, p_V[x] / offer_V[x])
        below, above = _beside(0, edge)[1], _beside(edge, 1)[0]
        taken = (*accept[:child], below, *accept[child + 1 :])
        yield from walk(child, parents, tokens, weight * edge, taken, target, draft, sampled)
        accept = (*accept[:child], above, *accept[child + 1 :])
        weight *= 1 - edge
        if weight <= 1e-12:
            return
        p_V = np.maximum(p_V - offer_V, 0)
        p_V /= p_V.sum()
        q_V[x] = 0
    if not children or target.way.temperature == 0:
        for v in np.flatnonzero(p_V):
            yield Run(tokens, weight * p_V[v], accept, 0.5, _only_at(node, int(v), len(tokens)))
        return
    for v, (low, high) in enumerate(pairwise([0, *np.cumsum(p_V)])):
        if high - low > 1e-9:
            for u in _beside(low, high):
                wrong = _only_at(node, (v + 1) % V, len(tokens))
                yield Run(tokens, weight * (high - low) / 2, accept, u, wrong)


def _only_at(node: int, token: int, nodes: int) -> tuple[int, ...]:
    """A token at one node, another one at the others."""
    return tuple(token if i == node else (token + 1) % V for i in range(nodes))


def _beside(low: float, high: float) -> tuple[float, float]:
    """Just above the low end of an interval and just below its high end, both in (0, 1)."""
    gap = EDGE * (high - low)
    return max(low + gap, BEFORE), min(high - gap, AFTER)


def emit(
    op: Callable[..., Verified],
    runs: list[Run],
    parents: tuple[int, ...],
    target: Model,
    draft: Model,
    sampled: bool,
    matching: bool,
) -> list[list[int]]:
    """The tokens of each run, from one call of the op."""
    sizes = [len(run.tokens) for run in runs] + [0] * (ROWS - len(runs))
    start_Q = np.concatenate([[0], np.cumsum(sizes)])
    logits_NV, draft_NV = np.full((2, NODES, VOCAB), -np.inf, np.float32)
    logits_NV[:, :V] = draft_NV[:, :V] = 0
    token_N, parent_N = np.zeros((2, NODES), np.int32)
    accept_N, draw_N = np.full(NODES, 0.5, np.float32), np.zeros(NODES, np.int32)
    for run, start in zip(runs, start_Q):
        for i, token in enumerate(run.tokens):
            depth = depth_of(i, parents)
            n = start + i
            logits_NV[n, :V], draft_NV[n, :V] = (
                target.logits_DVV[depth, token],
                draft.logits_DVV[depth, token],
            )
            token_N[n], parent_N[n], accept_N[n] = token, parents[i], run.accept[i]
            draw_N[n] = run.draws[i]
    laws = sample(logits_NV, target.way)
    if target.way.temperature > 0:
        laws = replace(laws, token_P=jnp.asarray(draw_N))
    if matching:
        laws = replace(laws, temperature_P=jnp.zeros_like(laws.temperature_P))
    residual_R = np.full(ROWS, 0.5, np.float32)
    residual_R[: len(runs)] = [run.residual for run in runs]
    extra = (jnp.asarray(draft_NV), sample(draft_NV, draft.way)) if sampled else ()
    arrays = [jnp.asarray(x) for x in (token_N, parent_N, start_Q.astype(np.int32), accept_N, residual_R)]
    result = op(jnp.asarray(logits_NV), laws, *arrays, *extra, max_nodes=MAX_NODES)
    counts, paths, nexts = (
        np.asarray(x) for x in (result.accepted_count_R, result.path_RD, result.next_token_R)
    )
    return [
        [*(int(token_N[n]) for n in paths[row, : counts[row]]), int(nexts[row])] for row in range(len(runs))
    ]
