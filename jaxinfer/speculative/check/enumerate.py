"""The exact law of what speculation emits, on a small vocabulary.

Whatever is emitted is a function of some uniform numbers, and constant between a few edges: where acceptance turns into
rejection, and at the end of each token's interval. The edges are computed from the processed law. A run just beside
each edge, weighted by the lengths of the intervals, integrates the result exactly; a run on the wrong side shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from jaxinfer.sampling.host import SamplingTable
from jaxinfer.speculative.check.operations import Chains, Operations, Row, Shape, prompt_state, verify_rows
from jaxinfer.speculative.check.target import PROMPT, Target

EDGE = 1e-3
"""Distance of a run from an edge, as a part of the interval."""
SMALLEST, LARGEST = 2.0**-33, 1 - 2.0**-24

CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1)
SHAPE = Shape(rows=128, nodes=512, max_nodes=4, history=2)


@dataclass(frozen=True)
class Weighted:
    """A run and its share of the whole."""

    row: Row
    weight: float


def law_by_rejection(
    ops: Operations, parents: tuple[int, ...], target: Target, draft: Target, sampled: bool
) -> np.ndarray:
    """Joint law of the next three tokens with ``speculative_verify``.

    Args:
        sampled: drafts are drawn from the draft's law, children without replacement; else they are its likeliest ones.
    """
    runs = [
        run
        for tokens, weight in _assignments(parents, (0,), 1.0, draft, sampled)
        for run in _walk(0, Row(parents[: len(tokens)], tokens), weight, target, draft, sampled)
        if run.weight > 0
    ]
    rows = [run.row for run in runs]
    return _joint(runs, verify_rows(ops, rows, target, draft if sampled else None, SHAPE), target)


def law_by_held_drafts(
    ops: Operations, parents: tuple[int, ...], target: Target, draft: Target, sampled: bool
) -> np.ndarray:
    """The same where ``speculative_verify`` holds drafts against tokens that the target drew at all nodes."""
    runs = [
        run
        for tokens, weight in _assignments(parents, (0,), 1.0, draft, sampled)
        for run in _held(0, Row(parents[: len(tokens)], tokens), weight, target)
    ]
    emitted = verify_rows(ops, [run.row for run in runs], target, None, SHAPE, matching=True)
    return _joint(runs, emitted, target)


def law_by_matching(
    ops: Operations, parents: tuple[int, ...], target: Target, draft: Target, sampled: bool
) -> np.ndarray:
    """The same with the engine's sampler and rule. A position's law is integrated over its own number; the numbers of
    the positions are independent."""
    V = target.vocab
    paths = list(_assignments(parents, (0,), 1.0, draft, sampled))
    rows = [Row(parents, tokens) for tokens, _ in paths]
    intervals = [[_intervals(target.law(row.history(node))) for node in range(len(parents))] for row in rows]
    sides = 2 * V
    uniform = np.full((len(paths), sides, len(parents)), 0.5)
    weight = np.zeros_like(uniform)
    for i, j in product(range(len(paths)), range(len(parents))):
        for side, (at, share) in enumerate(intervals[i][j]):
            uniform[i, side, j], weight[i, side, j] = at, share
    drafts = np.repeat([tokens[1:] for tokens, _ in paths], sides, axis=0)
    samples = _sampled(ops, target, drafts, uniform.reshape(-1, len(parents)))
    runs, emitted = [], []
    for i, (tokens, share) in enumerate(paths):
        laws = np.zeros((len(parents), V))
        for side, j in product(range(sides), range(len(parents))):
            laws[j, samples[i * sides + side, j]] += weight[i, side, j]
        for drawn in product(range(V), repeat=len(parents)):
            mass = share * float(np.prod([laws[j, v] for j, v in enumerate(drawn)]))
            if mass > 0:
                runs.append(Weighted(rows[i], mass))
                emitted.append(ops.emit(tokens[1:], drawn))
    return _joint(runs, emitted, target)


Law = Callable[[Operations, tuple[int, ...], Target, Target, bool], np.ndarray]


def _sampled(ops: Operations, target: Target, drafts_RK: np.ndarray, uniform_RK: np.ndarray) -> np.ndarray:
    """Samples of many sequences that have emitted nothing; R is padded to a fixed number."""
    count, depths = drafts_RK.shape
    R = max(128, -(-count // 128) * 128)
    drafts_RK = np.concatenate([drafts_RK, np.zeros((R - count, depths), int)])
    uniform_RK = np.concatenate([uniform_RK, np.full((R - count, depths + 1), 0.5)])
    table = SamplingTable(1, target.vocab, depths)
    table.set(0, target.params, (0, 0), len(PROMPT))
    chains = Chains(drafts_RK, np.full(R, PROMPT[-1]), np.zeros(R, int), np.full(R, len(PROMPT)))
    samples_RK, _ = chains.sample(ops, target, table, prompt_state(1, target.vocab), uniform_RK)
    return samples_RK[:count]


def _joint(runs: list[Weighted], emitted: list[list[int]], target: Target) -> np.ndarray:
    """Law of the next three tokens. A step that emits fewer is followed by one whose tokens have the right law, by the
    same test."""
    V = target.vocab
    found_VVV = np.zeros((V, V, V))
    for run, tokens in zip(runs, emitted, strict=True):
        first, *later = tokens[:3]
        second_V = np.eye(V)[later[0]] if later else target.law((first,))
        for second in np.flatnonzero(second_V).tolist():
            third_V = np.eye(V)[later[1]] if len(later) > 1 else target.law((first, second))
            found_VVV[first, second] += run.weight * second_V[second] * third_V
    return found_VVV


def _assignments(
    parents: tuple[int, ...], tokens: tuple[int, ...], weight: float, draft: Target, sampled: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Drafts and their probability. A node whose parent has no token left for it ends the tree."""
    node = len(tokens)
    if node == len(parents):
        yield tokens, weight
        return
    siblings = [tokens[i] for i in range(1, node) if parents[i] == parents[node]]
    q_V = draft.law(Row(parents, tokens).history(parents[node])).copy()
    q_V[siblings] = 0
    if q_V.sum() == 0:
        yield tokens, weight
    elif not sampled:
        yield from _assignments(parents, (*tokens, int(q_V.argmax())), weight, draft, sampled)
    else:
        for token in np.flatnonzero(q_V).tolist():
            share = weight * q_V[token] / q_V.sum()
            yield from _assignments(parents, (*tokens, token), share, draft, sampled)


def _walk(
    node: int, row: Row, weight: float, target: Target, draft: Target, sampled: bool
) -> Iterator[Weighted]:
    """Runs beside each edge of what can follow at a node."""
    V = target.vocab
    p_V, q_V = target.law(row.history(node)), draft.law(row.history(node)).copy()
    accept = row.accept or (0.5,) * len(row.tokens)
    children = [i for i in range(1, len(row.tokens)) if row.parents[i] == node]
    for child in children:
        x = row.tokens[child]
        offer_V = q_V / q_V.sum() if sampled else np.eye(V)[x]
        edge = min(1.0, p_V[x] / offer_V[x])
        taken = (*accept[:child], _beside(0, edge)[1], *accept[child + 1 :])
        yield from _walk(child, replace(row, accept=taken), weight * edge, target, draft, sampled)
        accept = (*accept[:child], _beside(edge, 1)[0], *accept[child + 1 :])
        weight *= 1 - edge
        if weight <= 1e-12:
            return
        p_V = np.maximum(p_V - offer_V, 0)
        p_V /= p_V.sum()
        q_V[x] = 0
    row = replace(row, accept=accept)
    if not children or target.params.greedy:
        for v in np.flatnonzero(p_V).tolist():
            yield Weighted(replace(row, draws=_only_at(node, v, row, V)), weight * p_V[v])
        return
    for v in range(V):
        for u, share in _intervals(p_V)[2 * v : 2 * v + 2]:
            wrong = _only_at(node, (v + 1) % V, row, V)
            yield Weighted(replace(row, residual=u, draws=wrong), weight * share)


def _held(node: int, row: Row, weight: float, target: Target) -> Iterator[Weighted]:
    """Runs for everything that the target can draw at a node, and behind a draft that equals it."""
    draws = row.draws or (0,) * len(row.tokens)
    p_V = target.law(row.history(node))
    for v in np.flatnonzero(p_V).tolist():
        drawn = replace(row, draws=(*draws[:node], v, *draws[node + 1 :]))
        behind = [i for i in range(1, len(row.tokens)) if row.parents[i] == node and row.tokens[i] == v]
        if behind:
            yield from _held(behind[0], drawn, weight * p_V[v], target)
        else:
            yield Weighted(drawn, weight * p_V[v])


def _only_at(node: int, token: int, row: Row, vocab: int) -> tuple[int, ...]:
    """A token at one node, another one at the others."""
    return tuple(token if i == node else (token + 1) % vocab for i in range(len(row.tokens)))


def _intervals(p_V: np.ndarray) -> list[tuple[float, float]]:
    """Two numbers for each token, beside the ends of its interval, and their shares; those of none have no share."""
    numbers = []
    for low, high in pairwise([0.0, *np.cumsum(p_V).tolist()]):
        share = (high - low) / 2 if high - low > 1e-9 else 0.0
        numbers += [(u, share) for u in _beside(low, high)]
    return numbers


def _beside(low: float, high: float) -> tuple[float, float]:
    """Just above the low end of an interval and just below its high end, both in (0, 1)."""
    gap = EDGE * (high - low)
    return min(max(low + gap, SMALLEST), LARGEST), max(min(high - gap, LARGEST), SMALLEST)
