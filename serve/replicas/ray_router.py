"""Ray Serve's request router, with our policy. Imports Ray: see ``serve.replicas.ray_app``."""

import time
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from serve.replicas.config import RoutingConfig
from serve.replicas.demand import KV_USAGE, REQUESTS
from serve.replicas.policy import Candidate, RouteKey, make_policy

SETTLED = 2.0
"""Seconds after which a choice that was made is in a replica's queue length, or was given up."""


class PolicyRouter(RequestRouter):  # type: ignore[misc]
    """Asks a ``Policy``. Ray keeps the queue lengths: it counts what this router sent, and every replica tells its own
    one, requests of other routers included, whenever it takes a request. KV usage is what ``record_routing_stats``
    told last.

    Runs in the process of an ingress, on one event loop.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = make_policy(RoutingConfig(**kwargs))
        self._chosen: dict[str, tuple[str, float]] = {}
        """By request: the replica it is on its way to, which the queue length does not show yet; and since when."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        candidates = [self._candidate(name, replica) for name, replica in by_name.items()]
        ranked = self._policy.rank(candidates, _key(pending_request))
        if pending_request is not None and ranked:
            self._chosen[pending_request.metadata.internal_request_id] = ranked[0], time.monotonic()
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        self._chosen.pop(pending_request.metadata.internal_request_id, None)
        self._policy.placed(replica_id.unique_id, _key(pending_request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._policy.keep({replica.replica_id.unique_id for replica in replicas})

    def _candidate(self, name: str, replica: RunningReplica) -> Candidate:
        told = replica.routing_stats or {}
        queue = self.replica_queue_len_cache.get(replica.replica_id)
        on_the_way = self._on_the_way(name)
        return Candidate(
            name, told.get(REQUESTS, 0.0) if queue is None else queue + on_the_way, told.get(KV_USAGE, 0.0)
        )

    def _on_the_way(self, name: str) -> int:
        since = time.monotonic() - SETTLED
        for request in [request for request, (_, chosen) in self._chosen.items() if chosen < since]:
            del self._chosen[request]
        return sum(replica == name for replica, _ in self._chosen.values())


def _key(request: PendingRequest | None) -> RouteKey:
    """What a call of ``EngineReplica.generate`` carries; other calls go to the least loaded replica."""
    key = None if request is None else request.kwargs.get("key")
    return key if isinstance(key, RouteKey) else RouteKey()
