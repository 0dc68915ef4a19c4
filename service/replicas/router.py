"""Ray's request router, which asks `placing` where a request goes.

Ray copies this module by value to wherever a router runs: it may hold no state.
"""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from service.replicas import directory
from service.replicas.placing import Load, Placement


class PlanRouter(RequestRouter):
    """Routes requests by their beginnings and plans. `beginning` and `only` are arguments of the call."""

    def initialize_state(self, **options: Any) -> None:
        """
        Args:
            options: `capacity`, see `Placement`.
        """
        self._placement = Placement(options["capacity"])
        self._under_way: Counter[tuple[str, str]] = Counter()  # by replica and request
        self._ongoing: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        directory.tell([replica.replica_id.unique_id for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, one in each rank, best first."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = {} if pending_request is None else pending_request.kwargs
        if (only := wanted.get("only")) in named:
            return [[named[only]]]
        loads = {
            name: Load(self._ongoing[name], replica.routing_stats.get("free_tokens")) for name, replica in named.items()
        }
        return [[named[name]] for name in self._placement.choose(wanted.get("beginning"), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        del result
        name = replica_id.unique_id
        self._under_way[name, pending_request.metadata.internal_request_id] += 1
        self._ongoing[name] += 1
        self._placement.note(pending_request.kwargs.get("beginning"), name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called for those too that a replica did not take."""
        name = replica_id.unique_id
        key = (name, internal_request_id)
        if self._under_way[key] > 0:
            self._ongoing[name] -= 1
            self._under_way[key] -= 1
        if self._under_way[key] == 0:
            del self._under_way[key]
