"""Replicas behind a handle of Ray Serve: the one place where Ray's errors become the server's own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import RayActorError, RaySystemError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from service.errors import NotReadyError, QueueFullError
from service.replicas import directory
from service.replicas.asgi import CarriedRequest
from service.replicas.forwarding import ReplicaGoneError
from service.replicas.placing import Beginning

SECONDS_TO_BE_TAKEN = 30.0
"""After which a request that no replica has taken is refused. Replicas take at once, and refuse by themselves."""


class RayReplicas:
    """The replicas of one deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle: Any = handle.options(stream=True)

    @property
    def names(self) -> Sequence[str]:
        return directory.names()

    async def ask(
        self, request: CarriedRequest, *, beginning: Beginning | None = None, only: str | None = None
    ) -> AsyncIterator[list[Message]]:
        """See `Replicas.ask`."""
        batches = self._handle.answer.remote(request, beginning=beginning, only=only)
        try:
            async with asyncio.timeout(SECONDS_TO_BE_TAKEN):
                await anext(batches)
            async for batch in batches:
                yield batch
        except (GeneratorExit, asyncio.CancelledError):
            batches.cancel()
            raise
        except TimeoutError:
            batches.cancel()
            raise self._not_taken() from None
        except BackPressureError as error:
            full = QueueFullError("too many requests wait for a replica")
            full.retry_after = 1
            raise full from error
        except DeploymentUnavailableError as error:
            raise NotReadyError("no replica could be started") from error
        except (RayActorError, RaySystemError, TaskCancelledError, RequestCancelledError) as error:
            raise ReplicaGoneError(str(error)) from error

    def _not_taken(self) -> NotReadyError | QueueFullError:
        within = f"within {SECONDS_TO_BE_TAKEN:g} seconds"
        if not self.names:
            return NotReadyError(f"no replica was there {within}")
        full = QueueFullError(f"no replica took the request {within}")
        full.retry_after = 1
        return full
