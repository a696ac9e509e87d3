"""How many replicas a load needs: pure functions of what replicas report and of the time of the day."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from serve.replicas.config import WEEKDAYS, Peak, ScalingConfig

REQUESTS, KV_USAGE = "requests", "kv_usage"
"""Names of what a replica reports: its sequences, running or waiting, and the share of its KV blocks in use."""


def wanted_replicas(
    config: ScalingConfig, reports: Sequence[Mapping[str, float]], queued: float, now: datetime
) -> int:
    """The number of replicas for a load, within the bounds.

    Sequences and KV usage are added up over the replicas and shared out again, so a single busy replica among idle
    ones, which is a matter of routing, starts no further one.

    Args:
        reports: ``REQUESTS`` and ``KV_USAGE`` of each replica that has reported.
        queued: requests that wait for a replica.
        now: with its time zone.
    """
    requests = queued + sum(report.get(REQUESTS, 0.0) for report in reports)
    usage = sum(report.get(KV_USAGE, 0.0) for report in reports)
    # Sums of decimal fractions: 3 x 0.7 is a little more than 2.1.
    needed = max(requests / config.target_requests, usage / config.target_kv_usage)
    least = max(
        config.min_replicas, scheduled_minimum(config.peaks, now.astimezone(ZoneInfo(config.timezone)))
    )
    return min(max(math.ceil(needed - 1e-9), least), config.max_replicas)


def scheduled_minimum(peaks: Iterable[Peak], local: datetime) -> int:
    """The largest minimum of the peaks at a time on their clock; 0 outside all of them."""
    return max((peak.min_replicas for peak in peaks if _during(peak, local)), default=0)


def _during(peak: Peak, local: datetime) -> bool:
    clock = local.time()
    today = WEEKDAYS[local.weekday()] in peak.days
    if peak.start < peak.end:
        return today and peak.start <= clock < peak.end
    yesterday = WEEKDAYS[(local - timedelta(days=1)).weekday()] in peak.days
    return (today and clock >= peak.start) or (yesterday and clock < peak.end)
