"""Thousands of sequences that are sampled with drafts, step by step, with random numbers of their own."""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.keys import stream_key
from jaxinfer.speculative.check.operations import Chains, Operations, Row, Shape, prompt_state, verify_rows
from jaxinfer.speculative.check.statistics import goodness_of_fit
from jaxinfer.speculative.check.target import PROMPT, Target

LENGTH = 4
"""Tokens of each sequence."""

DRAFTS = 3
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 1)
SAMPLER_BATCH, VERIFY_BATCH = 2000, 200
"""Sequences of a call of the sampler, and of one of ``speculative_verify``, whose work grows with their square."""


def sample_by_matching(ops: Operations, target: Target, draft: Target, count: int, seed: int) -> np.ndarray:
    """The first tokens of many sequences with the engine's sampler and rule, [count, LENGTH].

    The sampler's table, its state and the streams of random numbers are those of an engine. Drafts are drawn from the
    draft's law.
    """
    rng = np.random.default_rng(seed)
    table = SamplingTable(count, target.vocab, DRAFTS)
    for slot in range(count):
        table.set(slot, target.params, stream_key(seed, PROMPT, slot), len(PROMPT))
    state = prompt_state(count, target.vocab)
    outputs: list[list[int]] = [[] for _ in range(count)]
    while waiting := [slot for slot, tokens in enumerate(outputs) if len(tokens) < LENGTH]:
        for first in range(0, len(waiting), SAMPLER_BATCH):
            slots = waiting[first : first + SAMPLER_BATCH]
            tails = [tuple(outputs[slot]) for slot in slots]
            uniforms = rng.random((len(slots), DRAFTS)).tolist()
            drafts_RK = np.array([list(_chain(draft, tail, u)) for tail, u in zip(tails, uniforms)])
            newest_R = np.array([(*PROMPT, *tail)[-1] for tail in tails])
            positions_R = np.array([len(PROMPT) + len(tail) for tail in tails])
            chains = Chains(drafts_RK, newest_R, np.array(slots), positions_R)
            samples_RK, state = chains.sample(ops, target, table, state, rows=SAMPLER_BATCH)
            for slot, drafts, samples in zip(slots, drafts_RK.tolist(), samples_RK.tolist()):
                outputs[slot] += ops.emit(drafts, samples)
    return np.array([tokens[:LENGTH] for tokens in outputs])


def _chain(draft: Target, outputs: tuple[int, ...], uniforms: list[float]) -> Iterator[int]:
    """Drafts behind the newest token; what a draft model says of them does not depend on earlier outputs here."""
    path = outputs[-1:]
    for uniform in uniforms:
        token = draft.draw(path, uniform)
        path = (token,)
        yield token


def sample_by_rejection(
    ops: Operations,
    parents: tuple[int, ...],
    target: Target,
    draft: Target,
    count: int,
    seed: int,
) -> np.ndarray:
    """The same with ``speculative_verify`` and drafts drawn without replacement."""
    rng = np.random.default_rng(seed)
    nodes = VERIFY_BATCH * len(parents)
    shape = Shape(rows=VERIFY_BATCH, nodes=nodes, max_nodes=4, history=LENGTH + DRAFTS, often=True)
    outputs: list[tuple[int, ...]] = [()] * count
    while waiting := [i for i, tokens in enumerate(outputs) if len(tokens) < LENGTH]:
        uniforms = rng.uniform(2.0**-24, 1 - 2.0**-24, (len(waiting), 3 * len(parents) + 1)).tolist()
        rows = [_random_row(parents, outputs[i], target, draft, u) for i, u in zip(waiting, uniforms)]
        for i, tokens in zip(waiting, verify_rows(ops, rows, target, draft, shape)):
            outputs[i] = (*outputs[i], *tokens)
    return np.array([tokens[:LENGTH] for tokens in outputs])


def _random_row(
    parents: tuple[int, ...], outputs: tuple[int, ...], target: Target, draft: Target, uniforms: list[float]
) -> Row:
    """Args:
    uniforms: three for each node, and one for the residual.
    """
    tokens: tuple[int, ...] = (0,)
    for node in range(1, len(parents)):
        history = Row(parents, tokens, outputs).history(parents[node])[-1:]
        siblings = tuple(tokens[i] for i in range(1, node) if parents[i] == parents[node])
        ends = draft.ends(history, siblings)
        if ends is None:
            break
        tokens = (*tokens, bisect_right(ends, uniforms[3 * node]))
    row = Row(parents[: len(tokens)], tokens, outputs)
    draws = tuple(target.draw(history, uniforms[3 * i + 1]) for i, history in enumerate(row.histories()))
    accept = tuple(uniforms[3 * node + 2] for node in range(len(tokens)))
    return Row(row.parents, tokens, outputs, accept, uniforms[-1], draws)


def p_values(samples_XL: np.ndarray, target: Target) -> list[float]:
    """Of each position's token, and of each pair of neighbours."""
    law, V = target.joint(LENGTH), target.vocab
    values = []
    for width in (1, 2):
        for first in range(LENGTH - width + 1):
            axes = tuple(i for i in range(LENGTH) if not first <= i < first + width)
            cells_X = np.ravel_multi_index(tuple(samples_XL[:, first : first + width].T), (V,) * width)
            values.append(goodness_of_fit(np.bincount(cells_X, minlength=V**width), law.sum(axes)))
    return values
