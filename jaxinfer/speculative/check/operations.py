"""The functions that are under test, and batches of sequences for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.drafts import Drafts
from jaxinfer.sampling import host
from jaxinfer.sampling.device import sample
from jaxinfer.sampling.edits import edit
from jaxinfer.sampling.host import SamplingTable
from jaxinfer.sampling.inputs import SamplerState, SamplingInputs
from jaxinfer.sampling.state import init_state
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.speculative.check.target import PROMPT, Target
from pallas_kernels.sampling.xla import truncated_draw
from pallas_kernels.speculative_verify.xla import speculative_verify

COMPILER_OPTIONS: Mapping[bool, dict[str, str | int | bool]] = MappingProxyType(
    {
        often: {"xla_backend_optimization_level": int(often), "xla_llvm_disable_expensive_passes": True}
        for often in (False, True)
    }
)
"""For programs that run a few times, which take longer to compile than to run, and for one that runs often."""

BIASES = 8
"""Columns of bias. The engine's hundreds are padding here, and editing thousands of rows by them takes long."""


def matched(drafts: Sequence[int], samples: Sequence[int]) -> list[int]:
    """What the engine emits of a row with drafts."""
    return list(samples[: len(Drafts.chain(drafts).matching(samples)) + 1])


@dataclass(frozen=True)
class Operations:
    """What speculation consists of; tests replace parts by wrong ones.

    Attributes:
        sample: the engine's sampler, see ``jaxinfer.sampling.device``.
        edit: bias and penalties, see ``jaxinfer.sampling.edits``.
        draw: truncation, see ``pallas_kernels.sampling``.
        verify: rejection with residual, see ``pallas_kernels.speculative_verify``.
        emit: tokens that a row emits, given its drafts and the samples at their positions and behind.
    """

    sample: Callable[..., tuple[object, SamplerState]] = sample
    edit: Callable[..., jax.Array] = edit
    draw: Callable[..., object] = truncated_draw
    verify: Callable[..., object] = speculative_verify
    emit: Callable[[Sequence[int], Sequence[int]], list[int]] = matched


@dataclass(frozen=True)
class Row:
    """A sequence with drafts: a tree of nodes, parents first, of which the root is its newest token.

    Attributes:
        parents: index of each node's parent; -1 for the root.
        tokens: of each node; that of the root is not used.
        outputs: tokens that the sequence has emitted before; the root is the last of them.
        accept, residual: uniform numbers of ``speculative_verify``.
        draws: what the target draws at each node.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    accept: tuple[float, ...] = ()
    residual: float = 0.5
    draws: tuple[int, ...] = ()

    def histories(self) -> list[tuple[int, ...]]:
        """Output tokens up to each node."""
        found = [self.outputs]
        for parent, token in zip(self.parents[1:], self.tokens[1:]):
            found.append((*found[parent], token))
        return found

    def history(self, node: int) -> tuple[int, ...]:
        """Output tokens up to a node."""
        if node == 0:
            return self.outputs
        return (*self.history(self.parents[node]), self.tokens[node])


@dataclass(frozen=True)
class Shape:
    """Fixed sizes of a batch of rows, so that few programs are compiled.

    Attributes:
        often: there are many such batches.
    """

    rows: int
    nodes: int
    max_nodes: int
    history: int
    often: bool = False


def prompt_state(slots: int, vocab: int) -> SamplerState:
    """Slots of sequences that have their prompt and nothing else."""
    state = init_state(slots, vocab)
    return replace(state, prompt_seen_WV=state.prompt_seen_WV.at[:, list(PROMPT)].set(True))


def verify_rows(
    ops: Operations,
    rows: Sequence[Row],
    target: Target,
    draft: Target | None,
    shape: Shape,
    matching: bool = False,
) -> list[list[int]]:
    """What rows emit by ``speculative_verify``, in batches of a fixed shape.

    Args:
        draft: the laws that drafts were drawn from; None for deterministic ones.
        matching: drafts are held against the target's draws.
    """
    size = min(shape.rows, shape.nodes // max(len(row.parents) for row in rows))
    V = target.vocab
    drafts = () if draft is None else (draft.logits_VV, _inputs(draft.params, V, V))
    common = _Common(matching, _inputs(target.params, V, shape.nodes), prompt_state(1, V), drafts)
    emitted = []
    for start in range(0, len(rows), size):
        emitted += _verify_batch(ops, rows[start : start + size], target, shape, common)
    return emitted


@dataclass(frozen=True)
class _Common:
    """What batches of rows have in common.

    Attributes:
        drafts: logits [V, V] and parameters that drafts were drawn with; () for deterministic ones.
    """

    matching: bool
    inputs: SamplingInputs
    state: SamplerState
    drafts: tuple[np.ndarray, SamplingInputs] | tuple[()]


def _verify_batch(
    ops: Operations, rows: Sequence[Row], target: Target, shape: Shape, common: _Common
) -> list[list[int]]:
    N, V = shape.nodes, target.vocab
    start_Q = np.cumsum([0] + [len(row.parents) for row in rows] + [0] * (shape.rows - len(rows)))
    histories = [history for row in rows for history in row.histories()]
    none = (V,) * shape.history
    history_NK = _padded([(*history, *none[len(history) :]) for history in histories], N, V)
    newest_N = _padded([(*PROMPT, *history)[-1] for history in histories], N, 0)
    token_N = _padded([token for row in rows for token in row.tokens], N, 0)
    parent_N = _padded([parent for row in rows for parent in row.parents], N, 0)
    half, zero = (0.5,) * shape.max_nodes, (0,) * shape.max_nodes
    accept_N = _padded([u for row in rows for u in row.accept or half[: len(row.parents)]], N, 0.5)
    draw_N = _padded([token for row in rows for token in row.draws or zero[: len(row.parents)]], N, 0)
    residual_R = _padded([row.residual for row in rows], shape.rows, 0.5)
    inputs = replace(common.inputs, history_PK=history_NK)  # type: ignore[arg-type]
    drafts = (*common.drafts, newest_N) if common.drafts else ()
    arrays = (token_N, parent_N, start_Q.astype(np.int32), accept_N, residual_R)
    logits_NV = target.logits_VV[newest_N]
    counts, paths, nexts = _verify[shape.often](
        ops,
        shape.max_nodes,
        np.bool_(common.matching),
        logits_NV,
        inputs,
        common.state,
        draw_N,
        arrays,
        drafts,
    )
    return [
        [*token_N[path[:count]].tolist(), int(token)]
        for count, path, token in zip(*map(np.asarray, (counts, paths, nexts)))
    ][: len(rows)]


def _padded(values: Sequence[object], count: int, fill: float) -> np.ndarray:
    """Int32 or float32 [count, ...]."""
    array = np.asarray(values)
    padded = np.full((count, *array.shape[1:]), fill, np.int32 if array.dtype.kind == "i" else np.float32)
    padded[: len(array)] = array
    return padded


def _traced_verify(ops, max_nodes, matching, logits_NV, inputs, state, draw_N, arrays, drafts):  # type: ignore[no-untyped-def]
    edited_NV = ops.edit(logits_NV, inputs, state)
    laws = _laws(ops, edited_NV, inputs)
    laws = replace(laws, token_P=jnp.where(laws.temperature_P > 0, draw_N, laws.token_P))
    laws = replace(laws, temperature_P=jnp.where(matching, 0.0, laws.temperature_P))
    extra = _draft_laws(ops, *drafts) if drafts else ()
    result = ops.verify(edited_NV, laws, *arrays, *extra, max_nodes=max_nodes)
    return result.accepted_count_R, result.path_RD, result.next_token_R


_verify = {
    often: jax.jit(_traced_verify, static_argnums=(0, 1), compiler_options=options)
    for often, options in COMPILER_OPTIONS.items()
}


def _draft_laws(ops, logits_VV, inputs, newest_N):  # type: ignore[no-untyped-def]
    """Logits and law at each node: what drafts are drawn from follows from the newest token alone."""
    return jax.tree.map(lambda x_V: x_V[newest_N], (logits_VV, _laws(ops, logits_VV, inputs)))


def _laws(ops, logits_NV, inputs):  # type: ignore[no-untyped-def]
    half_N = jnp.full(len(logits_NV), 0.5, jnp.float32)
    return ops.draw(logits_NV, half_N, inputs.temperature_P, inputs.top_k_P, inputs.top_p_P, inputs.min_p_P)


def _inputs(params: SamplingParams, vocab: int, count: int) -> SamplingInputs:
    table = SamplingTable(1, vocab, 0)
    table.set(0, params, (0, 0), len(PROMPT))
    return _narrow(table.build(np.zeros(count, int), np.zeros(count, int), count))


def _narrow(inputs: SamplingInputs) -> SamplingInputs:
    assert not np.any(inputs.bias_values_PB[:, BIASES:]), "more biases than are checked"
    return replace(
        inputs,
        bias_ids_PB=inputs.bias_ids_PB[:, :BIASES],
        bias_values_PB=inputs.bias_values_PB[:, :BIASES],
    )


@dataclass(frozen=True)
class Chains:
    """Equally long chains of drafts behind each of some sequences, as the engine samples them.

    Attributes:
        drafts_RK: guesses.
        newest_R: newest token of each sequence.
        slots_R, positions_R: of the sequences, and of the token behind the newest one.
    """

    drafts_RK: np.ndarray
    newest_R: np.ndarray
    slots_R: np.ndarray
    positions_R: np.ndarray

    def sample(
        self,
        ops: Operations,
        target: Target,
        table: SamplingTable,
        state: SamplerState,
        uniform_RK: np.ndarray | None = None,
        rows: int | None = None,
    ) -> tuple[np.ndarray, SamplerState]:
        """The samples at each draft's position and behind the last one, [R, K + 1].

        Args:
            uniform_RK: numbers in the place of those of the sequences' own streams, [R, K + 1].
            rows: sequences that the program is compiled for; default: R.
        """
        R, K = self.drafts_RK.shape
        rows_RK = np.concatenate([self.newest_R[:, None], self.drafts_RK], axis=1)
        own_RK = np.concatenate([np.full((R, 1), -1), self.drafts_RK], axis=1)
        before_RK = np.arange(-1, R * (K + 1) - 1).reshape(R, K + 1)
        before_RK[:, 0] = -1
        depth_P = np.tile(np.arange(K + 1), R)
        size = (rows or R) * (K + 1)
        inputs = _narrow(
            table.build(
                np.repeat(self.slots_R, K + 1),
                np.repeat(self.positions_R, K + 1) + depth_P,
                size,
                drafts=host.Drafts(own_RK.ravel(), before_RK.ravel()),
            )
        )
        uniform_P = None if uniform_RK is None else _padded(uniform_RK.ravel(), size, 0.5)  # type: ignore[arg-type]
        logits_PV = target.logits_VV[_padded(rows_RK.ravel(), size, 0)]  # type: ignore[arg-type]
        token_P, state = _sample(ops, logits_PV, inputs, state, uniform_P)
        return np.asarray(token_P)[: R * (K + 1)].reshape(R, K + 1), state


def _traced_sample(ops, logits_PV, inputs, state, uniform_P):  # type: ignore[no-untyped-def]
    def draw(edited_PV: jax.Array, own_P: jax.Array, *rest: jax.Array) -> object:
        return ops.draw(edited_PV, own_P if uniform_P is None else uniform_P, *rest)

    outputs, state = ops.sample(logits_PV, inputs, state, None if uniform_P is None else draw)
    return outputs.token_P, state


_sample = jax.jit(_traced_sample, static_argnums=(0,), compiler_options=COMPILER_OPTIONS[False])
