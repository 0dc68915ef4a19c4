"""`ropewalk serve --ray N`: a Ray cluster, the application on it, and its end."""

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from service.errors import StartupError
from service.listening import listening, url_of
from service.replicas.application import application
from service.settings import Settings

logger = logging.getLogger(__name__)

NAME = "ropewalk"
BYTES_OF_SHARED_MEMORY = 128 * 2**20  # requests and answers pass through, which are small


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end.

    Raises:
        StartupError: the replicas cannot start.
    """
    until = threading.Event()

    def end(number: int, _: FrameType | None) -> None:
        if until.is_set():  # the second time at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        until.set()

    with listening(settings.host, settings.port) as (listener, *_):
        port = listener.getsockname()[1]  # what is wrong with the address is told here, and Ray takes no port for any
        url = url_of(settings.host, listener)
    with _cluster(settings):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)  # Ray has put its own in place
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a single server reads its keys again, and lives
        _start(settings, port)
        if not until.is_set():
            logger.info("ready: %s takes requests, %s/docs describes them", url, url, extra={"fields": {"url": url}})
        until.wait()
        logger.info("shutting down: what runs may end within %d s", settings.shutdown_seconds)
        serve.delete(NAME)  # waits until the replicas have ended


@contextmanager
def _cluster(settings: Settings) -> Iterator[None]:
    """The cluster that `RAY_ADDRESS` names, else one on this machine that ends with this process."""
    assert settings.ray is not None
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=True)
    else:
        ray.init(
            address="local",
            num_cpus=settings.ray * settings.ray_cpus,
            include_dashboard=False,
            object_store_memory=BYTES_OF_SHARED_MEMORY,
        )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _start(settings: Settings, port: int) -> None:
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(
                host=settings.host,
                port=port,
                request_timeout_s=None,  # a long answer takes as long as it takes
                keep_alive_timeout_s=75,
            ),
        )
        serve.run(application(settings), name=NAME, route_prefix="/")
    except (RayError, RayServeException, RuntimeError) as error:
        said = re.findall(r"StartupError: (.+)", str(error)) or [str(error).strip().splitlines()[-1]]
        raise StartupError(f"the replicas cannot start: {said[-1]}") from error
