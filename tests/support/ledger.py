"""A runner that checks what a model would read: every visible slot of every step holds the right token's content."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import Engine
from jaxinfer.kv_cache.prefix_cache import CachedBlock
from jaxinfer.request import Sequence
from jaxinfer.runner.protocol import Runner, StepResult
from jaxinfer.runner.scripted import Script, ScriptedRunner
from jaxinfer.runner.simulated import CostModel, SimulatedRunner
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from tests.support import engines


@dataclass(frozen=True)
class _Done:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Ledger:
    """A runner around another one. The "K and V" of a token is a hash of salt and all tokens up to it.

    It asserts, for each step, that token ids, positions, contexts, tables and slots are those of the sequences, that
    no slot is written twice, that padding writes to block 0 only, and that all a row can see is what it computed
    or what another sequence computed for the same tokens.

    Attributes:
        plans: of all steps.
    """

    def __init__(
        self, inner: Runner, plan: CompilePlan, windows: tuple[int | None, ...], num_blocks: int
    ) -> None:
        self.plans: list[StepPlan] = []
        self._inner = inner
        self._plan = plan
        self._windows = windows
        self._content: list[list[object]] = [[None] * (num_blocks * plan.block_size) for _ in windows]
        self._tokens: dict[Sequence, list[int]] = {}
        self._hashes: dict[Sequence, list[object]] = {}
        self._newest: dict[int, int] = {}
        self._snapshots: dict[tuple[bytes, int, int], list[object]] = {}

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _Done:
        assert plan.rows, "a step without tokens"
        self.plans.append(plan)
        self._copy(plan)
        views = Packing.make(self._plan, arrays.token_bucket).views(arrays.packed)
        token_ids, positions, query_start, context_len, *per_group = views
        groups = len(self._windows)
        for r, row in enumerate(plan.rows):
            span = slice(query_start[r], query_start[r + 1])
            self._check_tokens(row, token_ids[span], positions[span])
            assert context_len[r] == row.start + row.num_tokens
        self._check_sampled(arrays, query_start, plan)
        for g in range(groups):
            self._write(plan, query_start, per_group[groups + g], g)
            for r, row in enumerate(plan.rows):
                self._read(row, per_group[g][r], g)
        result = self._inner.dispatch(plan, arrays).result()
        for row, token in zip(arrays.samples.rows, result.tokens):
            self._newest[row.seq.slot] = int(token)
            self._tokens[row.seq].append(int(token))
        return _Done(result)

    def check_cached(self, nodes: list[CachedBlock]) -> None:
        """Asserts that the content of cached blocks is what it was when they were first seen here."""
        size = self._plan.block_size
        seen = {}
        for node in nodes:
            for g, block in enumerate(node.blocks):
                if block:
                    content = self._content[g][block * size : (block + 1) * size]
                    key = (node.digest, g, block)
                    assert self._snapshots.get(key, content) == content, "a cached block was changed"
                    seen[key] = content
        self._snapshots = seen

    def _copy(self, plan: StepPlan) -> None:
        """As the device does it: in calls of limited size, each of which reads all sources before it writes."""
        size, most = self._plan.block_size, self._plan.copied_blocks
        for start in range(0, len(plan.copies), most):
            copies = plan.copies[start : start + most]
            sources = [self._content[c.group][c.source * size : (c.source + 1) * size] for c in copies]
            for copy, source in zip(copies, sources):
                self._content[copy.group][copy.target * size : (copy.target + 1) * size] = source

    def _check_tokens(self, row: ScheduledRow, ids: np.ndarray, positions: np.ndarray) -> None:
        tokens = self._tokens.setdefault(row.seq, list(row.seq.request.prompt_token_ids))
        stop = row.start + row.num_tokens
        resolved = [int(t) if t >= 0 else self._newest[-int(t) - 1] for t in ids]
        assert resolved == tokens[row.start : stop], "a step computes other tokens than the sequence has"
        assert positions.tolist() == list(range(row.start, stop))
        assert row.samples == (stop == len(tokens) and row.seq.max_tokens > 0)

    def _check_sampled(self, arrays: StepArrays, query_start: np.ndarray, plan: StepPlan) -> None:
        ends = {row.seq: query_start[r + 1] - 1 for r, row in enumerate(plan.rows)}
        assert arrays.samples.tokens.tolist() == [ends[row.seq] for row in arrays.samples.rows]

    def _hash(self, seq: Sequence, position: int) -> object:
        hashes, tokens = self._hashes.setdefault(seq, []), self._tokens[seq]
        while len(hashes) <= position:
            before = hashes[-1] if hashes else seq.request.cache_salt
            hashes.append(hash((before, tokens[len(hashes)])))
        return hashes[position]

    def _write(self, plan: StepPlan, query_start: np.ndarray, slots: np.ndarray, group: int) -> None:
        count, size = int(query_start[len(plan.rows)]), self._plan.block_size
        assert len(set(slots[:count].tolist())) == count, "a slot is written twice"
        assert (slots[:count] >= size).all(), "a token is written to the padding block"
        assert (slots[count:] < size).all(), "padding is written outside block 0"
        for r, row in enumerate(plan.rows):
            for i, slot in enumerate(slots[query_start[r] : query_start[r + 1]].tolist()):
                self._content[group][slot] = self._hash(row.seq, row.start + i)

    def _read(self, row: ScheduledRow, table: np.ndarray, group: int) -> None:
        window, size = self._windows[group], self._plan.block_size
        first = 0 if window is None else max(row.start - window + 1, 0)
        for position in range(first, row.start + row.num_tokens):
            found = self._content[group][int(table[position // size]) * size + position % size]
            assert found == self._hash(row.seq, position), f"position {position} holds something else"


def ledgered(
    settings: EngineConfig | None = None,
    *,
    script: Script | None = None,
    windows: tuple[int | None, ...] = (None,),
    **options,
) -> tuple[engines.Engine, Ledger]:
    """An engine with a ledger around a scripted runner, or around a simulated one without a script."""
    settings = settings or engines.config()
    num_blocks = settings.cache.num_blocks
    assert num_blocks is not None
    made: list[Ledger] = []

    def runner(plan: CompilePlan) -> Runner:
        vocab = options.get("vocab", engines.VOCAB)
        inner: Runner = SimulatedRunner(vocab, CostModel())
        if script is not None:
            inner = ScriptedRunner(script, vocab, plan, options.get("eos", engines.EOS))
        made.append(Ledger(inner, plan, windows, num_blocks))
        return made[0]

    factory: Callable[[CompilePlan], Runner] = runner
    engine: Engine = engines.build(
        factory, settings, windows=windows, shared_sampler=script is not None, **options
    )
    return engine, made[0]
