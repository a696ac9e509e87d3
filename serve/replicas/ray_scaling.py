"""Ray Serve's autoscaling policy, with our demand."""

from datetime import UTC, datetime
from typing import Any

from ray.serve.config import AutoscalingContext

from serve.replicas.config import ScalingConfig
from serve.replicas.demand import KV_USAGE, REQUESTS, wanted_replicas


class DemandPolicy:
    """Runs in the controller of Ray Serve, which applies delays and bounds to what it answers.

    Args:
        scaling: a ``ScalingConfig`` as plain data.
    """

    def __init__(self, scaling: dict[str, Any]) -> None:
        self._config = ScalingConfig.model_validate(scaling)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        names = {name for values in told.values() for name in values}
        reports = [
            {kind: told[kind][name] for kind in (REQUESTS, KV_USAGE) if name in told.get(kind, {})}
            for name in names
        ]
        queued = context.total_queued_requests or 0.0
        return wanted_replicas(self._config, reports, queued, datetime.now(UTC)), {}
