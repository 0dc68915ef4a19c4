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
        self._ongoing: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = [replica.replica_id.unique_id for replica in replicas]
        directory.tell(names)
        for name in self._ongoing.keys() - set(names):
            del self._ongoing[name]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, one in each rank, best first."""
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = {} if pending_request is None else pending_request.kwargs
        if (only := wanted.get("only")) in named:
            return [[named[only]]]
        loads = {name: self._load(replica) for name, replica in named.items()}
        return [[named[name]] for name in self._placement.choose(wanted.get("beginning"), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        del result
        self._placement.note(pending_request.kwargs.get("beginning"), replica_id.unique_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counted here, for Ray's own count forgets what is on its way whenever a replica says what it has."""
        super().on_send_request(replica_id)
        self._ongoing[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called once for each that was sent, however it ended."""
        del internal_request_id
        self._ongoing[replica_id.unique_id] -= 1

    def _load(self, replica: RunningReplica) -> Load:
        ongoing = max(0, self._ongoing[replica.replica_id.unique_id])
        return Load(ongoing, replica.routing_stats.get("free_tokens"))
