"""What an engine tells about itself: counters, gauges and the newest steps, as plain data."""

from dataclasses import dataclass, field

MAX_STEP_RECORDS = 256
"""Newest steps that are kept."""


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histogram of tokens per step."""


@dataclass(frozen=True)
class StepRecord:
    """One committed step, for timelines.

    Attributes:
        index: number of the step since start.
        start: seconds on the clock of ``time.monotonic`` when it was planned.
        host_seconds: schedule, build, dispatch and commit.
        device_seconds: from dispatch to results, as far as the host can see.
        prefill_tokens, decode_tokens, padded_tokens: tokens of the step by kind.
        sequences: rows of the step.
        preempted: sequences that lost their blocks.
        drafts: decoded tokens that are drafts to verify.
        interval: seconds from the results of the step before to those of this one; from ``start`` if it did not follow
            at once.
    """

    index: int
    start: float
    host_seconds: float
    device_seconds: float
    prefill_tokens: int
    decode_tokens: int
    padded_tokens: int
    sequences: int
    preempted: int
    drafts: int = 0
    interval: float = 0.0


@dataclass
class TransferStats:
    """Blocks of K and V that came from other engines and went to them, since start.

    Attributes:
        sent_bytes, received_bytes: of content, as it travels.
        sent_blocks, received_blocks: blocks of a KV group, with all its layers.
        fetches, fetches_failed: prompts that other engines were asked for, and those that were computed here after all.
        fetch_seconds: from asking to the end, of all that ended.
        jobs, jobs_failed: prompts that other engines asked for; those that failed or that nobody wanted any more.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_blocks: int = 0
    received_blocks: int = 0
    fetches: int = 0
    fetches_failed: int = 0
    fetch_seconds: float = 0.0
    jobs: int = 0
    jobs_failed: int = 0


@dataclass(frozen=True)
class EngineSnapshot:
    """Counters never fall. Gauges are true when the snapshot is taken.

    Attributes:
        running, waiting: sequences; ``fetching`` of the waiting ones wait for blocks of another engine.
        waiting_tokens: prompt tokens of waiting sequences.
        num_blocks, used_blocks, cached_blocks: usable blocks, those held by sequences, and those that are free but
            hold a cached prefix; over all KV groups.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens of first admissions that looked in the prefix cache, and
            those found.
        drafts, drafted_tokens, accepted_tokens: verified drafts of sequences, and their tokens; ``accepted_by_depth``
            counts accepted tokens by their place in the draft.
        requests_admitted: requests; ``requests_finished`` counts each once, by finish reason of its last choice.
        admission_rejections: requests refused for a full queue.
        step_host_seconds, step_device_seconds: totals.
        compilations: programs compiled after warm-up.
        steps_by_tokens: dispatched steps by their number of tokens: at most the bound in ``STEP_TOKENS``, and above the
            one before it; last those above all bounds.
        expert_tokens: tokens that experts got, drafts included, by the number of the expert, all layers together; empty
            without experts.
        expert_peak_tokens: tokens of the busiest expert of each step, added up, by layer.
        transfers: between engines.
        steps: newest records, oldest first.
        block_owners: one entry per block of the first KV group for the pool map: 0 free, 1 cached only, 2 held by one
            sequence, 3 shared. Empty unless asked for.
    """

    running: int = 0
    waiting: int = 0
    fetching: int = 0
    waiting_tokens: int = 0
    num_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    steps_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    requests_admitted: int = 0
    requests_finished: dict[str, int] = field(default_factory=dict)
    admission_rejections: int = 0
    step_host_seconds: float = 0.0
    step_device_seconds: float = 0.0
    compilations: int = 0
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    expert_tokens: tuple[int, ...] = ()
    expert_peak_tokens: dict[int, int] = field(default_factory=dict)
    transfers: TransferStats = field(default_factory=TransferStats)
    steps: tuple[StepRecord, ...] = ()
    block_owners: tuple[int, ...] = ()
