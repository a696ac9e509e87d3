"""The server's own counters, read before and after a load."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

PREFIXES = ("jaxinfer:", "vllm:")
"""In order of preference; a server that exports both says the same twice."""
PREFIX_QUERIES, PREFIX_HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
PREEMPTIONS = "num_preemptions_total"


def scrape(client: httpx.Client) -> dict[str, float] | None:
    """Samples of ``/metrics`` by name without prefix, summed over their labels; None if there are none to read."""
    try:
        response = client.get("/metrics")
    except httpx.HTTPError:
        return None
    return parse(response.text) if response.status_code == 200 else None


def parse(text: str) -> dict[str, float] | None:
    by_prefix: dict[str, dict[str, float]] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return None
    for family in families:
        for sample in family.samples:
            prefix, colon, name = sample.name.partition(":")
            values = by_prefix.setdefault(prefix + colon, {})
            values[name] = values.get(name, 0.0) + sample.value
    return next((by_prefix[prefix] for prefix in PREFIXES if prefix in by_prefix), None)


def difference(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, float | None]:
    """Prefix-hit rate and preemptions during the load; None where the server does not tell."""
    queries, hits, preemptions = (
        _grown(before, after, name) for name in (PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS)
    )
    rate = hits / queries if hits is not None and queries else None
    return {"prefix_cache_hit_rate": rate, "preemptions": preemptions}


def _grown(before: Mapping[str, float] | None, after: Mapping[str, float] | None, name: str) -> float | None:
    if before is None or after is None or name not in after:
        return None
    return after[name] - before.get(name, 0.0)
