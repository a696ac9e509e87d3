"""All shapes that the engine compiles, as one value."""

from dataclasses import dataclass

from jaxinfer.config import SchedulerConfig

SMALLEST_ROWS = 8
"""Smallest row bucket but one: a head of 8 rows takes hardly longer than one of 2, and a bucket costs a compilation."""

MAX_SCORED_ROWS = 64
"""Rows of one scoring call (prompt log-probabilities); longer chunks take several calls of the same program."""


@dataclass(frozen=True)
class CompilePlan:
    """Shape buckets. Keys add, they do not multiply: a step of T tokens always has R(T) table rows of width M, and
    head and sampler see only the number of sampled rows P.

    Attributes:
        token_buckets: T of the backbone programs.
        row_buckets: P of the sampling programs.
        scored_rows: P of the scoring program.
        copied_blocks: pairs of the block copy program.
        max_drafts: K, most drafts of a sequence in a step; 0 without speculation.
        tree_words: U, words of a tree mask; 0 if drafts are chains.
        moved_slots: pairs of the program that moves accepted drafts of trees.
        max_num_seqs: W batch slots.
        table_width: M.
        num_groups: KV groups, one block table each.
        block_size: S.
    """

    token_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    scored_rows: int
    copied_blocks: int
    max_num_seqs: int
    table_width: int
    num_groups: int
    block_size: int
    max_drafts: int = 0
    tree_words: int = 0
    moved_slots: int = 0

    @classmethod
    def make(
        cls,
        scheduler: SchedulerConfig,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        min_tokens: int = 1,
        draft_limits: tuple[int, int] = (0, 0),
        tree_nodes: int = 0,
    ) -> "CompilePlan":
        """Buckets for a configuration.

        Args:
            min_tokens: smallest bucket; 2 for bfloat16 weights on a CPU, where a product with one row is
                pathologically slow.
            draft_limits: most drafts of a sequence, and of all of them, in a step.
            tree_nodes: most drafts of a tree that attention sees at once; 0: drafts are chains.
        """
        max_drafts, max_step_drafts = draft_limits
        tokens = max(scheduler.max_num_batched_tokens, min_tokens)
        return cls(
            token_buckets=_token_buckets(min_tokens, tokens),
            row_buckets=_row_buckets(min_tokens, max(scheduler.max_num_seqs + max_step_drafts, min_tokens)),
            scored_rows=min(MAX_SCORED_ROWS, tokens),
            copied_blocks=max(4, min(scheduler.max_num_seqs, 16)) * num_groups,
            max_num_seqs=scheduler.max_num_seqs,
            table_width=-(-max_model_len // block_size),
            num_groups=num_groups,
            block_size=block_size,
            max_drafts=max_drafts,
            tree_words=-(-(1 + tree_nodes) // 32) if tree_nodes else 0,
            moved_slots=max_step_drafts if tree_nodes else 0,
        )

    def tokens(self, count: int) -> int:
        """The bucket T for a step of ``count`` tokens."""
        return next(b for b in self.token_buckets if b >= count)

    def rows(self, count: int) -> int:
        """The bucket P for ``count`` sampled rows."""
        return next(b for b in self.row_buckets if b >= count)

    def table_rows(self, token_bucket: int) -> int:
        """R of a step whose token bucket is T."""
        return min(token_bucket, max(self.max_num_seqs, self.token_buckets[0]))

    @property
    def num_programs(self) -> int:
        """Backbones; a head and a sampler per row bucket; head and program of scoring; copy, slot reset, pooling."""
        heads = {*self.row_buckets, self.scored_rows}
        return len(self.token_buckets) + len(self.row_buckets) + len(heads) + 4


def _token_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two, with a step halfway from 32 on, up to ``largest``."""
    sizes = {smallest, largest}
    size = 1
    while size < largest:
        if size >= smallest:
            sizes.add(size)
        if size >= 32 and size * 3 // 2 < largest:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


def _row_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """The smallest, and powers of two from SMALLEST_ROWS up to ``largest``."""
    sizes = {smallest, largest}
    size = SMALLEST_ROWS
    while size < largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))
