"""A runner that plays the device with token histories in the place of K and V, and checks all that a step reads.

The K and V of a token are a function of everything up to it. The shadow stores a digest of exactly that in each slot of
each block, and executes what a device would: the copies of a step, then its writes, then the reads of every token. A
slot that a token may see must hold the digest of that position of that very sequence, so wrong sharing, wrong
copy-on-write, early reuse of blocks under overlap and a window that closes too early all show at the step that
goes wrong.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxinfer.batch.builder import StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.request import Sequence
from jaxinfer.runner.protocol import LogprobRows, ScoredChunk, StepResult, scored_range
from jaxinfer.sampling.limits import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS
from jaxinfer.scheduler.plan import BlockRead, ScheduledRow, StepPlan

EMPTY = b"nothing"
POISON = b"poison"
DIGEST = 8
"""Bytes of a digest, which are K and V of a token between engines."""
Sick = Callable[[str, int, int], bool]
"""(request id, choice, position) -> whether the logits for that position are NaN."""


def root(salt: str | None) -> bytes:
    return hashlib.blake2b(repr(salt).encode(), digest_size=8).digest()


def extend(history: bytes, token: int) -> bytes:
    """Digest of a history with one more token."""
    return hashlib.blake2b(history + token.to_bytes(4, "little"), digest_size=8).digest()


class ShadowModel:
    """A deterministic "model": the next token follows from the history, and from the stream of a random sequence.

    Args:
        span: tokens are 0 to ``span - 1``; a small one makes sequences share what they generate.
        sick: positions whose logits are not finite.
    """

    def __init__(self, span: int = 6, sick: Sick = lambda request_id, index, position: False) -> None:
        self.span = span
        self.sick = sick

    def next_token(self, seq: Sequence, history: bytes) -> int:
        return self._token(history, b"" if seq.request.params.greedy else repr(seq.key).encode())

    def greedy_tokens(self, history: bytes, count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(self._token(history, b""))
            history = extend(history, tokens[-1])
        return tokens

    def _token(self, history: bytes, stream: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(history + stream, digest_size=4).digest(), "little") % self.span

    def logprob(self, history: bytes, token: int) -> float:
        return -float(np.float32(int.from_bytes(extend(history, token)[:2], "little") / 1000))

    def output(self, seq: Sequence, count: int) -> list[int]:
        """The tokens that a sequence alone would generate."""
        history = histories(seq.request.cache_salt, seq.request.prompt_token_ids)[-1]
        tokens: list[int] = []
        for _ in range(count):
            tokens.append(self.next_token(seq, history))
            history = extend(history, tokens[-1])
        return tokens


def histories(salt: str | None, token_ids: tuple[int, ...] | list[int]) -> list[bytes]:
    """Digest of each position's history, the position included."""
    chain = [root(salt)]
    for token in token_ids:
        chain.append(extend(chain[-1], token))
    return chain[1:]


@dataclass(frozen=True)
class _ShadowHandle:
    runner: "ShadowRunner"
    step: StepResult

    def result(self) -> StepResult:
        self.runner.num_results += 1
        return self.step


class ShadowRunner:
    """Executes steps on shadow memory.

    Attributes:
        num_dispatched, num_results: steps so far.
        kv: the engine's cache manager, if it is set: then no write may hit a cached or a shared block.
    """

    def __init__(
        self, model: ShadowModel, plan: CompilePlan, windows: tuple[int | None, ...], num_blocks: int
    ) -> None:
        self.model = model
        self.kv: KVCacheManager | None = None
        self.plan = plan
        self.windows = windows
        self.num_dispatched = 0
        self.num_results = 0
        self._memory = [{b: [EMPTY] * plan.block_size for b in range(num_blocks)} for _ in windows]
        self._newest: dict[int, int] = {}
        self._chains: dict[Sequence, list[bytes]] = {}
        self._ill: set[Sequence] = set()

    def dispatch(self, plan: StepPlan, arrays: StepArrays) -> _ShadowHandle:
        self.num_dispatched += 1
        assert 0 < plan.num_tokens <= arrays.token_bucket
        batch = Packing.make(self.plan, arrays.token_bucket).views(arrays.packed)
        token_ids_T, positions_T, query_start_Q, context_len_R, *per_group = batch
        tables, slots = per_group[: len(self.windows)], per_group[len(self.windows) :]
        self._check_shape(plan, arrays, query_start_Q, context_len_R, positions_T)
        self._copy(plan)
        written: set[tuple[int, int]] = set()
        for r, row in enumerate(plan.rows):
            at = int(query_start_Q[r])
            ids = token_ids_T[at : at + row.num_tokens].tolist()
            ids = [token if token >= 0 else self._newest[-token - 1] for token in ids]
            self._note(row, ids)
            for group in range(len(self.windows)):
                self._write(row, group, slots[group][at : at + row.num_tokens].tolist(), written)
        for read in plan.reads:
            self._give(read)
        for group in range(len(self.windows)):
            assert not slots[group][plan.num_tokens :].any(), "padding writes outside block 0"
            for r, row in enumerate(plan.rows):
                self._read(row, group, tables[group][r])
        return _ShadowHandle(self, self._sample(plan, arrays))

    def write_blocks(self, group, layers, blocks, contents) -> None:
        """Content that another engine computed: digests, in the place of K of a layer for each group."""
        assert layers == (group,)
        for block, slots in zip(blocks, contents[0], strict=True):
            assert block, "block 0 is written"
            if self.kv is not None:
                assert self.kv.pools[group].references(block) == 1, "a shared block is written"
                assert not self.kv.cache.holds(group, block), "a cached block is written"
            self._memory[group][block] = [bytes(slot) for slot in np.asarray(slots)[0]]

    # ---- parts of a step

    def _give(self, read: BlockRead) -> None:
        slots = [slot.ljust(DIGEST) for block in read.blocks for slot in self._memory[read.group][block]]
        shape = (len(read.blocks), 1, self.plan.block_size, DIGEST)
        content = np.frombuffer(b"".join(slots), np.uint8).reshape(shape)
        read.take((read.group,), 0, (content, content))

    def _check_shape(
        self,
        plan: StepPlan,
        arrays: StepArrays,
        query_start_Q: np.ndarray,
        context_len_R: np.ndarray,
        positions_T: np.ndarray,
    ) -> None:
        rows = plan.rows
        assert len({row.seq for row in rows}) == len(rows), "a sequence has two rows"
        assert len({row.seq.slot for row in rows}) == len(rows), "two rows share a batch slot"
        counts = [row.num_tokens for row in rows]
        assert min(counts) > 0
        assert query_start_Q.tolist()[: len(rows) + 1] == np.cumsum([0, *counts]).tolist()
        assert (query_start_Q[len(rows) :] == plan.num_tokens).all()
        assert context_len_R.tolist()[: len(rows)] == [row.start + row.num_tokens for row in rows]
        assert not context_len_R[len(rows) :].any()
        assert positions_T[: plan.num_tokens].tolist() == [
            row.start + i for row in rows for i in range(row.num_tokens)
        ]
        sampled = [r for r, row in enumerate(rows) if row.samples]
        assert arrays.samples.rows == tuple(rows[r] for r in sampled)
        assert arrays.samples.tokens.tolist() == [int(query_start_Q[r + 1]) - 1 for r in sampled]

    def _copy(self, plan: StepPlan) -> None:
        """As the device does: within one call of the copy program all sources are read before any is written."""
        size = self.plan.copied_blocks
        for start in range(0, len(plan.copies), size):
            part = plan.copies[start : start + size]
            content = [list(self._memory[c.group][c.source]) for c in part]
            for copy, slots in zip(part, content):
                assert copy.source, "block 0 is copied"
                assert copy.target, "a copy goes to block 0"
                self._memory[copy.group][copy.target] = slots

    def _note(self, row: ScheduledRow, ids: list[int]) -> None:
        """Extends what is known of a sequence, and checks that a recomputed token is the one it was."""
        seq = row.seq
        prompt = list(seq.request.prompt_token_ids)
        chain = self._chains.setdefault(seq, [])
        for position, token in enumerate(ids, start=row.start):
            if position < len(prompt):
                assert token == prompt[position], "a prompt token changed"
        if not chain:
            chain += histories(seq.request.cache_salt, prompt)
        for position, token in enumerate(ids, start=row.start):
            history = extend(chain[position - 1] if position else root(seq.request.cache_salt), token)
            if position < len(chain):
                assert chain[position] == history, f"token {position} differs from the one that was sampled"
            else:
                assert position == len(chain), "a position was skipped"
                chain.append(history)

    def _write(self, row: ScheduledRow, group: int, slots: list[int], written: set[tuple[int, int]]) -> None:
        S = self.plan.block_size
        for position, slot in enumerate(slots, start=row.start):
            block = slot // S
            assert slot % S == position % S
            assert block, f"position {position} is written to block 0"
            assert block == row.seq.tables[group][position // S], "a token goes to a block of somebody else"
            assert (group, slot) not in written, "two tokens of a step share a slot"
            written.add((group, slot))
            if self.kv is not None:
                assert self.kv.pools[group].references(block) == 1, "a shared block is written"
                assert not self.kv.cache.holds(group, block), "a cached block is written"
            ill = row.seq in self._ill
            self._memory[group][block][slot % S] = POISON if ill else self._chains[row.seq][position]

    def _read(self, row: ScheduledRow, group: int, table: np.ndarray) -> None:
        if row.seq in self._ill:
            return
        S, window = self.plan.block_size, self.windows[group]
        first = 0 if window is None else max(row.start - window + 1, 0)
        chain = self._chains[row.seq]
        for position in range(first, row.start + row.num_tokens):
            block = int(table[position // S])
            assert block, f"position {position} is visible and its block is 0"
            found = self._memory[group][block][position % S]
            if found != chain[position]:
                known = {value: f"position {i} of itself" for i, value in enumerate(chain)}
                raise AssertionError(
                    f"request {row.seq.request.request_id} choice {row.seq.index}, group {group}: position {position} "
                    f"(block {block}) holds {known.get(found, found)}"
                )

    def _sample(self, plan: StepPlan, arrays: StepArrays) -> StepResult:
        tokens, healthy, chosen = [], [], []
        for row in arrays.samples.rows:
            seq, position = row.seq, row.start + row.num_tokens
            history = self._chains[seq][position - 1]
            token = self.model.next_token(seq, history)
            sick = seq in self._ill or self.model.sick(seq.request.request_id, seq.index, position)
            if sick:
                self._make_ill(row)
            tokens.append(0 if sick else token)
            healthy.append(not sick)
            chosen.append(self.model.logprob(history, token))
            self._newest[seq.slot] = tokens[-1]
        scores = {i: self._score(row) for i, row in enumerate(plan.rows) if len(range(*scored_range(row)))}
        return StepResult(np.array(tokens, np.int32), np.array(healthy, bool), _rows(chosen), scores)

    def _make_ill(self, row: ScheduledRow) -> None:
        """What the row wrote in this step is not to be trusted."""
        self._ill.add(row.seq)
        S = self.plan.block_size
        for group in range(len(self.windows)):
            for position in range(row.start, row.start + row.num_tokens):
                self._memory[group][row.seq.tables[group][position // S]][position % S] = POISON

    def _score(self, row: ScheduledRow) -> ScoredChunk:
        first, stop = scored_range(row)
        chain, prompt = self._chains[row.seq], row.seq.request.prompt_token_ids
        return ScoredChunk(
            first, _rows([self.model.logprob(chain[p - 1], prompt[p]) for p in range(first, stop)])
        )


def _rows(chosen: list[float]) -> LogprobRows:
    P = len(chosen)
    return LogprobRows(
        np.array(chosen, np.float32),
        np.ones(P, np.int32),
        np.zeros((P, MAX_LOGPROBS), np.int32),
        np.full((P, MAX_LOGPROBS), -50, np.float32),
        np.zeros((P, MAX_LOGPROB_TOKEN_IDS), np.float32),
    )
