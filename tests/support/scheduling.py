"""A scheduler without an engine: what the core does with its plans, in a few functions."""

from jaxinfer.config import SchedulerConfig
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.request import Sequence, Status
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from tests.support.sequences import make_sequence

BLOCK = 4


def make(num_blocks: int = 33, *, windows=(None,), caching: bool = True, **options) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    kv = KVCacheManager((num_blocks,) * len(windows), BLOCK, windows, caching)
    return Scheduler(SchedulerConfig(**values), kv)


def add(scheduler: Scheduler, prompt, **options) -> Sequence:
    seq = make_sequence(prompt, **options)
    scheduler.add([seq])
    return seq


def commit(scheduler: Scheduler, plan: StepPlan | None, token: int = 7) -> None:
    """What the core does with the results of a step."""
    assert plan is not None
    for row in plan.rows:
        row.seq.num_in_flight -= row.samples
        if row.seq.status is not Status.FINISHED:
            scheduler.commit(row)
            if row.samples:
                row.seq.output_token_ids.append(token)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    commit(scheduler, plan)
    scheduler.check_integrity()
    assert plan is not None
    return plan


def counts(plan: StepPlan | None) -> dict[Sequence, int]:
    assert plan is not None
    return {row.seq: row.num_tokens for row in plan.rows}
