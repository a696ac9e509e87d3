"""What runs in the next step: pure host logic over sequences, blocks and batch slots."""

import bisect
from collections.abc import Container, Iterable

from jaxinfer.config import SchedulerConfig
from jaxinfer.drafts import NO_DRAFTS, Drafts
from jaxinfer.kv_cache.manager import BlockCopy, KVCacheManager, PrefixHit
from jaxinfer.request import FinishReason, QueueFullError, RequestError, Sequence, Status
from jaxinfer.scheduler.choices import parent_to_share, waits_for_parent
from jaxinfer.scheduler.fetching import Fetches, FetchPolicy
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan
from jaxinfer.scheduler.queue import WaitingQueue
from jaxinfer.scheduler.scheduling_pass import Pass

_RUNNING = Status.RUNNING
"""For every sequence in every step: Python 3.11 takes 0.2 us to read a member off its enum."""


class Scheduler:
    """Plans steps under a token budget, mixing decodes with prefill chunks.

    Everything is "compute the next n tokens of a sequence": prefill, chunks, decode, prefix hits, recompute after a
    preemption. The most urgent sequences are planned first, so the most urgent one always makes progress and the
    least urgent is the one that loses its blocks when there are too few.

    Args:
        fetch: when another engine computes a prompt; None: never.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, fetch: FetchPolicy | None = None) -> None:
        self.config = config
        self.kv = kv
        self.waiting = WaitingQueue(config.policy == "priority")
        self.running: list[Sequence] = []
        """Sorted, most urgent first."""
        self.fetches = Fetches(fetch, kv, self.waiting.key)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._pass = Pass(0)
        self._unreported_preemptions = 0

    # ---- the life of a sequence

    def add(self, sequences: list[Sequence]) -> None:
        """Queues the sequences of one or more requests: all, or none. Every choice counts with its whole prompt.

        Raises:
            QueueFullError: an admission limit is reached. A queue without prompt tokens takes any number of them,
                as the request could never be served otherwise.
            RequestError: they are more than may ever wait.
        """
        limit, token_limit = self.config.max_waiting_seqs, self.config.max_waiting_tokens
        if limit is not None and len(sequences) > limit:
            several = sequences[0].request is not sequences[-1].request
            asked = f"prompts times n is {len(sequences)}" if several else f"n is {len(sequences)}"
            raise RequestError(
                f"{asked}, but at most {limit} sequences may wait", "prompt" if several else "n"
            )
        if limit is not None and self.num_waiting + len(sequences) > limit:
            raise QueueFullError(f"{self.num_waiting} sequences are waiting and the limit is {limit}")
        tokens = self.num_waiting_tokens
        added = sum(seq.num_prompt for seq in sequences)
        if token_limit is not None and tokens and tokens + added > token_limit:
            raise QueueFullError(f"{tokens} prompt tokens are waiting and the limit is {token_limit}")
        for seq in sequences:
            self.waiting.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence in whatever state it is and frees all it holds; a second call does nothing.

        Steps in flight may still write to its blocks: they run before any step that gets these blocks, and their
        results are dropped at commit.
        """
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.kv.release(seq)
        elif seq.status is Status.FETCHING:
            self.fetches.drop(seq)
            self.kv.release(seq)
        else:
            self._leave(seq)
            self.running.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def fetched(self, seq: Sequence, num_tokens: int) -> None:
        """Takes note that the blocks a sequence waited for are there, computed and sound; it waits for a slot now.

        Args:
            num_tokens: 0: they do not come, and it computes its prompt itself.
        """
        first = self.fetches.remove(seq)
        seq.status = Status.WAITING
        if num_tokens:
            seq.num_computed = seq.num_committed = num_tokens
            self.kv.commit(seq)
            for other in self.waiting:
                if other.lacks == first:
                    other.lacks = None
        else:
            self.kv.release(seq)
            seq.may_fetch = False
        self.waiting.add(seq)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute here."""
        return bool(self.running or self.waiting)

    @property
    def waits_for_blocks(self) -> bool:
        """Whether another pass would find the same as the last one until a fetch ends."""
        return bool(self.fetches.fetching) and not self._pass.preempted

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a batch slot or for blocks from another engine."""
        return len(self.waiting) + len(self.fetches.fetching)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these."""
        return self.waiting.num_prompt_tokens + self.fetches.num_prompt_tokens

    def live_sequences(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.fetches.fetching
        yield from self.waiting

    def reserve(self, seq: Sequence, num_tokens: int) -> int:
        """Gives a running sequence blocks for tokens to come, but none that the next tokens of others may need.

        Returns:
            Tokens that it has blocks for, at most ``num_tokens``.
        """
        if self.kv.extend(seq, num_tokens, spare=len(self.running)):
            return num_tokens
        return min(num_tokens, self.kv.capacity(seq))

    # ---- one pass

    def schedule(self, busy: Container[Sequence] = frozenset(), batches: int = 1) -> StepPlan | None:
        """Plans the next step; None if nothing can run before a result comes back.

        Args:
            busy: sequences that are in another batch, and so in none that is planned now.
            batches: that are in flight at the same time. If there are several, none takes more than its share of the
                sequences, so that the others have some.
        """
        self._pass = Pass(self.config.max_num_batched_tokens, busy, self._share(batches))
        running = list(self.running)
        for index, seq in enumerate(running):
            if self._pass.full:
                break
            if seq.status is _RUNNING and seq not in busy:
                self._plan_running(seq, len(running) - index - 1)
        self._admit_waiting()
        self._return_budget()
        return self._finish_pass()

    def _share(self, batches: int) -> int:
        """Most sequences of a step."""
        if batches == 1:
            return len(self.running) + len(self.waiting)
        could_run = len(self.running) + min(len(self.waiting), len(self._free_slots))
        return max(1, -(-could_run // batches))

    def _plan_running(self, seq: Sequence, others: int) -> None:
        """Plans the next tokens of a running sequence.

        Args:
            others: sequences behind it, whose next tokens matter more than its drafts.
        """
        generated = len(seq.output_token_ids) + seq.num_in_flight
        count = seq.num_prompt + generated - seq.num_computed
        if count <= 0 or (generated >= seq.max_tokens and seq.num_computed >= seq.num_prompt):
            return  # it waits for a result
        if count > 1:
            count = min(count, self._pass.budget, self._chunk_limit(seq, seq.num_computed))
        if seq.drafts.tokens:
            drafts = self._affordable_drafts(seq, count, others)
            if drafts and self.kv.extend(seq, seq.num_computed + count + len(drafts)):
                self._pass.plan(seq, count, drafts)
                return
        while not self.kv.extend(seq, seq.num_computed + count):
            victim = self.running[-1]
            if self._take_held_blocks(victim):
                self._pass.preempted += 1
                continue
            self._preempt(victim)
            if victim is seq:
                return
        self._pass.plan(seq, count)

    def _admit_waiting(self) -> None:
        """Admits from the head of the queue only: nobody passes a sequence that waits for blocks.

        Choices whose sibling still computes their common prompt, and preempted sequences whose newest token is
        still in flight, are passed over: they wait for a result, not for room. So are those whose prompt another engine
        computes, once they have their blocks. A pass that took blocks away from somebody admits nobody.
        """
        if self._pass.preempted:
            return
        for seq in list(self.waiting):
            if seq.num_in_flight or seq in self._pass.busy or waits_for_parent(seq, self._pass.admitted):
                continue
            if self.fetches.candidate(seq):
                if self.fetches.has_to_wait(seq):
                    continue
                hit = self.fetches.hit(seq)
                if hit is not None:
                    if not self.fetches.has_to_wait(seq) and not self._fetch(seq, hit):
                        return
                    continue
            if len(self._pass.planned) >= self._pass.most:
                return
            if self._pass.budget == 0 and not self._take_budget_for(seq):
                return
            if not self._free_slots and not self._make_room_for(seq):
                return
            while not self._admit(seq):
                if not self._take_held_blocks(seq) and not self._make_room_for(seq):
                    return

    def _fetch(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Lets a waiting sequence wait for its blocks; False if there is no room for them."""
        while not self.fetches.start(seq, hit):
            if not self._take_held_blocks(seq):
                return False
            hit = self.kv.find(seq)
        self.waiting.remove(seq)
        return True

    def _take_held_blocks(self, seq: Sequence) -> bool:
        """Takes the blocks of the least urgent sequence that holds some without running, if ``seq`` is more urgent.

        Such a sequence waits for its blocks to arrive, or for a slot. Without this those that run, or wait at the head
        of the queue, could wait for blocks of one that waits for them.
        """
        holders = [*self.fetches.fetching, *(s for s in self.waiting if any(s.tables))]
        victim = max(holders, key=self.waiting.key, default=seq)
        if self.waiting.key(victim) <= self.waiting.key(seq):
            return False
        self.kv.release(victim)
        victim.num_computed = victim.num_committed = 0
        if victim.status is Status.FETCHING:
            self.fetches.drop(victim)
            victim.status = Status.WAITING
            self.waiting.add(victim)
        return True

    def _admit(self, seq: Sequence) -> bool:
        parent = parent_to_share(seq, self.kv)
        copies: list[BlockCopy] | None
        if any(seq.tables):  # computed elsewhere
            computed = seq.num_computed
            count = min(seq.num_tokens - computed, self._pass.budget, self._chunk_limit(seq, computed))
            copies = [] if self.kv.extend(seq, computed + count) else None
        elif parent is not None:
            computed, count = seq.num_prompt - 1, 1
            copies = self.kv.fork(parent, seq, computed)
            if copies is not None and not self.kv.extend(seq, seq.num_prompt):
                self.kv.release(seq)
                copies = None
        else:
            hit = self.kv.find(seq)
            computed = hit.num_tokens
            count = min(seq.num_tokens - computed, self._pass.budget, self._chunk_limit(seq, computed))
            copies = self.kv.admit(seq, hit, computed + count, seq.num_tokens)
        if copies is None:
            return False
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=self.waiting.key)
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        seq.num_computed = seq.num_committed = computed
        if seq.num_cached < 0:
            seq.num_cached = computed
        self._pass.admitted[seq] = copies
        self._pass.plan(seq, count)
        return True

    def _take_budget_for(self, seq: Sequence) -> bool:
        """Under the priority policy, unplans a strictly less urgent sequence, which keeps its slot and blocks."""
        if self.config.policy != "priority":
            return False
        victim = next((r for r in reversed(self.running) if r in self._pass.planned), None)
        if victim is None or victim.request.priority <= seq.request.priority:
            return False
        count = self._pass.planned[victim] - len(self._pass.drafts.get(victim, NO_DRAFTS))
        self._pass.displaced.append((victim, count))
        self._pass.cancel(victim)
        return True

    def _return_budget(self) -> None:
        """What more urgent sequences left over goes back to those that gave it, the most urgent first.

        None gets more than it gave, for that is what it has blocks for; a preemption may have left over more.
        """
        for seq, count in reversed(self._pass.displaced):
            if self._pass.budget and seq.status is Status.RUNNING:
                self._pass.plan(seq, min(count, self._pass.budget))

    def _make_room_for(self, seq: Sequence) -> bool:
        """Under the priority policy, takes slot and blocks of a strictly less urgent sequence that may still yield."""
        if self.config.policy != "priority":
            return False
        victim = next((r for r in reversed(self.running) if r.yielded < self.config.max_preemptions), None)
        if victim is None or victim.request.priority <= seq.request.priority:
            return False
        victim.yielded += 1
        self._preempt(victim)
        return True

    def _affordable_drafts(self, seq: Sequence, count: int, others: int) -> Drafts:
        """The drafts that the next step may verify; none unless it computes the newest token."""
        drafts, seq.drafts = seq.drafts, NO_DRAFTS
        if not drafts or seq.num_in_flight or seq.num_computed + count != seq.num_tokens:
            return NO_DRAFTS
        if count > 1 and not drafts.is_chain:
            return NO_DRAFTS  # the words of a tree mask are made for one token before the tree
        return drafts.first(max(0, self._pass.budget - count - others))

    def _chunk_limit(self, seq: Sequence, computed: int) -> int:
        """Decodes are not limited; the chunk size applies to what is computed in bulk."""
        chunk = self.config.chunk_size
        return self._pass.budget if chunk is None or seq.num_tokens - computed == 1 else chunk

    def _preempt(self, seq: Sequence) -> None:
        """Takes blocks and slot away; what the sequence got in this very pass is taken back as well."""
        self._pass.cancel(seq)
        self._leave(seq)
        self.running.remove(seq)
        seq.status = Status.WAITING
        seq.num_computed = seq.num_committed = 0
        seq.drafts = NO_DRAFTS
        seq.epoch += 1
        seq.preemptions += 1
        self._pass.preempted += 1
        self._unreported_preemptions += 1
        self.waiting.add(seq)

    def _leave(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    def _finish_pass(self) -> StepPlan | None:
        rows = []
        drafts_of = self._pass.drafts
        for seq, count in self._pass.planned.items():
            drafts = drafts_of.get(seq, NO_DRAFTS) if drafts_of else NO_DRAFTS
            start = seq.num_computed
            seq.num_computed = end = start + count
            generated = len(seq.output_token_ids) + seq.num_in_flight
            samples = end - len(drafts.tokens) == seq.num_prompt + generated and seq.max_tokens > 0
            rows.append(ScheduledRow(seq, start, count, samples, seq.epoch, generated, drafts))
            seq.num_in_flight += samples
        if not rows:
            return None
        copies = tuple(copy for copies in self._pass.admitted.values() for copy in copies)
        preempted, self._unreported_preemptions = self._unreported_preemptions, 0
        return StepPlan(tuple(rows), tuple(self._pass.admitted), copies, preempted)

    # ---- results

    def commit(self, row: ScheduledRow, accepted: int = 0) -> None:
        """Takes note that a row's K and V are computed and sound.

        Args:
            accepted: drafts, from the first position on, that are tokens of the sequence by now. The others are to be
                computed again.
        """
        seq = row.seq
        if row.epoch == seq.epoch and seq.status is _RUNNING:
            drafts = row.drafts.tokens
            seq.num_committed = row.start + row.num_tokens - len(drafts) + accepted
            if drafts:
                seq.num_computed = seq.num_committed
            self.kv.commit(seq)

    def check_integrity(self) -> None:
        """Asserts that queues, slots and blocks agree."""
        self.kv.check_integrity(self.live_sequences())
        slots = sorted(seq.slot for seq in self.running) + sorted(self._free_slots)
        assert sorted(slots) == list(range(self.config.max_num_seqs)), "batch slots were lost or given twice"
        live, fetching = list(self.live_sequences()), self.fetches.fetching
        assert len(set(map(id, live))) == len(self.running) + len(fetching) + len(self.waiting)
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert all(seq.status is Status.FETCHING and seq.slot < 0 for seq in fetching)
        assert all(seq.status is Status.WAITING for seq in self.waiting)
        assert all(seq.num_committed or not any(seq.tables) for seq in self.waiting)
        assert self.num_waiting_tokens == sum(seq.num_prompt for seq in [*self.waiting, *fetching])
