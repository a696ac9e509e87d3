"""Snapshots of a running engine."""

from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.engine.core import EngineCore
from jaxinfer.kv_cache.manager import KVCacheManager
from jaxinfer.observability.compilation import CompilationMonitor
from jaxinfer.observability.snapshot import EngineSnapshot, StepRecord, TransferStats

FREE, CACHED, HELD, SHARED = range(4)
"""Owners of a block in ``EngineSnapshot.block_owners``."""


def take_snapshot(
    core: EngineCore, compilations: CompilationMonitor, steps: Sequence[StepRecord] | None = None
) -> EngineSnapshot:
    """Counters and gauges of the moment, without the pool map. May be called on any thread: it reads single values
    and copies what may change.

    Args:
        steps: records to report; the newest ones that are kept if absent.
    """
    stats, scheduler = core.stats, core.scheduler
    pools = scheduler.kv.pools
    num_blocks = sum(pool.num_usable for pool in pools)
    return EngineSnapshot(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        fetching=len(scheduler.fetches.fetching),
        waiting_tokens=scheduler.num_waiting_tokens,
        num_blocks=num_blocks,
        used_blocks=num_blocks - sum(pool.num_free for pool in pools),
        cached_blocks=scheduler.kv.num_cached_free,
        steps_total=stats.steps_committed,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        computed_tokens=stats.computed_tokens,
        padded_tokens=stats.padded_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        preemptions=stats.preemptions,
        drafts=stats.drafts,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        accepted_by_depth=tuple(stats.accepted_by_depth),
        requests_admitted=stats.requests_admitted,
        requests_finished={reason.value: count for reason, count in stats.requests_finished.copy().items()},
        admission_rejections=stats.requests_rejected,
        step_host_seconds=stats.host_seconds,
        step_device_seconds=stats.device_seconds,
        compilations=compilations.count,
        steps_by_tokens=tuple(stats.steps_by_tokens),
        expert_tokens=tuple(stats.expert_tokens_LE.sum(axis=0).tolist()),
        expert_peak_tokens=dict(zip(stats.sparse_layers, stats.expert_peak_tokens_L.tolist())),
        transfers=TransferStats() if core.remote is None else replace(core.remote.stats),
        steps=tuple(stats.records) if steps is None else tuple(steps),
    )


def block_owners(kv: KVCacheManager) -> tuple[int, ...]:
    """One number per usable block of the first KV group; to be called on the loop's thread."""
    pool = kv.pools[0]
    owners = []
    for block in range(1, pool.num_blocks):
        references = pool.references(block)
        if references == 0:
            owners.append(CACHED if kv.cache.holds(0, block) else FREE)
        else:
            owners.append(HELD if references == 1 else SHARED)
    return tuple(owners)
