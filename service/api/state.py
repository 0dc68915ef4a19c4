"""What the routes share: one server's parts, and whether it is ready."""

import logging
from dataclasses import dataclass, field
from time import time
from typing import Annotated

from fastapi import Depends, Request

from service.build import InspectedModel, LoadedServer
from service.engine.handle import Mailbox
from service.errors import NotReadyError, UnknownModelError
from service.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)


@dataclass
class Server:
    """One server.

    Attributes:
        settings: as started.
        inspected: the model's name, config and policy.
        metrics: of this server.
        mailbox: carries events to the event loop that serves.
        loaded: the running engine; None until it is warm.
        started: Unix time, in seconds.
    """

    settings: Settings
    inspected: InspectedModel
    metrics: Metrics
    mailbox: Mailbox
    loaded: LoadedServer | None = None
    started: int = field(default_factory=lambda: int(time()))

    def set_loaded(self, loaded: LoadedServer) -> None:
        """From here on requests are served."""
        self.loaded = loaded
        logger.info("ready")

    def require_loaded(self) -> LoadedServer:
        """The running engine.

        Raises:
            NotReadyError: the model is still loading.
        """
        if self.loaded is None:
            raise NotReadyError(f"the model {self.inspected.name} is still loading")
        return self.loaded

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model than the one served."""
        if name not in (None, self.inspected.name):
            message = f"model {name!r} is not served here; the served model is {self.inspected.name!r}"
            raise UnknownModelError(message, param="model")


def get_server(request: Request) -> Server:
    """The server that the request came to."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


ServerDep = Annotated[Server, Depends(get_server)]
