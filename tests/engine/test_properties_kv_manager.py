"""The KV cache manager alone, driven at random beside a naive model that searches instead of indexing."""

from collections.abc import Sequence as Seq

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.kv_cache.manager import BlockCopy, KVCacheManager
from jaxinfer.request import Sequence, Status
from tests.support.sequences import make_sequence

Key = tuple[str | None, tuple[int, ...]]
"""Salt and all tokens up to the end of a full block: what its content depends on."""

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 3), (4,), (2, 7), (None, 1, 6))
TEXTS = tuple(tuple((i * k) % 3 for i in range(40)) for k in (1, 2))


class ManagerMachine(RuleBasedStateMachine):
    """Admits, extends, forks, ends and distrusts sequences.

    The naive side keeps, per group, which block holds which content for the cache, and per slot of the device which
    history it holds.
    """

    @initialize(windows=st.sampled_from(WINDOWS), size=st.integers(1, 4), num_blocks=st.integers(6, 20))
    def start(self, windows: tuple[int | None, ...], size: int, num_blocks: int) -> None:
        self.size, self.windows = size, windows
        self.kv = KVCacheManager((num_blocks,) * len(windows), size, windows, True)
        self.groups = range(len(windows))
        self.live: list[Sequence] = []
        self.cached: list[dict[int, Key]] = [{} for _ in windows]
        self.memory: list[dict[tuple[int, int], Key]] = [{} for _ in windows]

    # ---- rules

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 20),
        tail=st.lists(st.integers(0, 2), max_size=2),
        salt=st.sampled_from([None, None, "s"]),
        chunk=st.integers(1, 20),
    )
    def admit(
        self, text: tuple[int, ...], length: int, tail: list[int], salt: str | None, chunk: int
    ) -> None:
        seq = make_sequence([*text[:length], *tail], num_groups=len(self.windows), salt=salt)
        hit = self.kv.find(seq)
        self.check_hit(seq, hit.num_tokens, hit.tables)
        count = min(chunk, seq.num_tokens - hit.num_tokens)
        before = self.state()
        copies = self.kv.admit(seq, hit, hit.num_tokens + count, seq.num_tokens)
        if copies is None:
            assert self.state() == before, "a refused admission changed something"
            return
        self.enter(seq, copies, hit.num_tokens, [len(table) for table in hit.tables])
        self.compute(seq, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 6))
    def extend(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        if seq.num_computed == seq.num_tokens:
            seq.output_token_ids.append(data.draw(st.integers(0, 2)))
        count = min(chunk, seq.num_tokens - seq.num_computed)
        before, lengths = self.state(), [len(table) for table in seq.tables]
        if not self.kv.extend(seq, seq.num_computed + count):
            assert self.state() == before, "a refused extension changed something"
            return
        self.note_taken(seq, lengths)
        self.compute(seq, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        shared = parent.num_prompt - 1
        if shared < 1 or not self.kv.can_fork(parent, shared):
            return
        child = make_sequence(
            parent.request.prompt_token_ids, num_groups=len(self.windows), salt=parent.request.cache_salt
        )
        before = self.state()
        copies = self.kv.fork(parent, child, shared)
        if copies is None:
            assert self.state() == before, "a refused fork changed something"
            return
        self.enter(child, copies, shared, [shared // self.size] * len(self.windows))
        lengths = [len(table) for table in child.tables]
        if self.kv.extend(child, child.num_prompt):
            self.note_taken(child, lengths)
            self.compute(child, 1)
        else:
            self.end(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), trusted=st.integers(0, 4))
    def leave(self, data: st.DataObject, trusted: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        if trusted == 0:
            self.kv.forget(seq)
            keys = {self.key(seq, i) for i in range(seq.num_tokens // self.size)}
            self.cached = [{b: k for b, k in held.items() if k not in keys} for held in self.cached]
        self.end(seq)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 0:
            self.kv.reset_prefix_cache()
            self.cached = [{} for _ in self.windows]

    # ---- the naive side

    def key(self, seq: Sequence, block: int) -> Key:
        return (seq.request.cache_salt, tuple(seq.token_ids(0, (block + 1) * self.size)))

    def first_visible(self, group: int, position: int) -> int:
        """Position of the first token that a token at ``position`` can see."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0)

    def check_hit(self, seq: Sequence, num_tokens: int, tables: Seq[Seq[int]]) -> None:
        """The hit is the longest there is, and its blocks hold what it says."""
        S, limit = self.size, seq.num_tokens - 1
        held = [set(cached.values()) for cached in self.cached]

        def has(count: int) -> bool:
            return all(
                self.key(seq, i) in held[g]
                for g in self.groups
                for i in range(self.first_visible(g, count * S) // S, count)
            )

        full = max(count for count in range(limit // S + 1) if has(count))
        tokens = seq.token_ids(0, limit)
        extra = 0
        for salt, content in set.intersection(*held):
            if (
                salt == seq.request.cache_salt
                and len(content) == (full + 1) * S
                and content[: full * S] == tuple(tokens[: full * S])
            ):
                pairs = list(zip(content[full * S :], tokens[full * S :]))
                equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
                extra = max(extra, equal)
        assert num_tokens == full * S + extra
        for g, table in enumerate(tables):
            assert len(table) == full
            for i in range(self.first_visible(g, full * S) // S, full):
                assert self.cached[g][table[i]] == self.key(seq, i)

    def enter(self, seq: Sequence, copies: list[BlockCopy], computed: int, shared: list[int]) -> None:
        """A sequence has its blocks: those behind the ``shared`` first ones of each group are new."""
        seq.status = Status.RUNNING
        seq.num_computed = seq.num_committed = computed
        self.live.append(seq)
        content = [[self.memory[c.group].get((c.source, s)) for s in range(self.size)] for c in copies]
        self.note_taken(seq, shared)
        for copy, slots in zip(copies, content):
            for s, value in enumerate(slots):
                if value is not None:
                    self.memory[copy.group][copy.target, s] = value

    def note_taken(self, seq: Sequence, lengths: Seq[int]) -> None:
        """Blocks that were handed out hold nothing any more."""
        for g, length in zip(self.groups, lengths):
            for block in seq.tables[g][length:]:
                assert block, "block 0 is handed out"
                self.cached[g].pop(block, None)
                for s in range(self.size):
                    self.memory[g].pop((block, s), None)

    def compute(self, seq: Sequence, count: int) -> None:
        """Writes the next tokens, looks at all that they see, and commits them."""
        S, salt, start = self.size, seq.request.cache_salt, seq.num_computed
        for g in self.groups:
            for p in range(start, start + count):
                block = seq.tables[g][p // S]
                assert self.kv.pools[g].references(block) == 1, "a shared block is written"
                assert block not in self.cached[g], "a cached block is written"
                self.memory[g][block, p % S] = (salt, tuple(seq.token_ids(0, p + 1)))
            for p in range(self.first_visible(g, start), start + count):
                found = self.memory[g].get((seq.tables[g][p // S], p % S))
                assert found == (salt, tuple(seq.token_ids(0, p + 1))), f"position {p} of group {g} is wrong"
        seq.num_computed = seq.num_committed = start + count
        blocks = [list(table) for table in seq.tables]
        first_new = seq.num_filed
        self.kv.commit(seq)
        for i in range(first_new, seq.num_computed // S):
            for g in self.groups:
                block, key = blocks[g][i], self.key(seq, i)
                if block and block not in self.cached[g] and key not in self.cached[g].values():
                    self.cached[g][block] = key

    def end(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self.live.remove(seq)

    def state(self) -> object:
        pools = [
            (pool.free_order(), [pool.references(b) for b in range(pool.num_blocks)])
            for pool in self.kv.pools
        ]
        return (
            pools,
            [list(map(list, seq.tables)) for seq in self.live],
            [dict(c) for c in self.kv.cache._owner],
        )

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self.live)
        for g in self.groups:
            owner = {block: node.digest for block, node in self.kv.cache._owner[g].items()}
            assert owner.keys() == self.cached[g].keys(), "the cache holds other blocks than it should"
        for seq in self.live:
            for g, window in enumerate(self.windows):
                held = [i for i, block in enumerate(seq.tables[g]) if block]
                if window is not None and held:
                    assert held[0] >= self.first_visible(g, seq.num_committed) // self.size


ManagerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestManager = ManagerMachine.TestCase
