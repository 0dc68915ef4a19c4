"""One server on the fake model for all tests of a module; each test leaves it idle."""

from collections.abc import Iterator

import httpx
import pytest

from tests.serving import FakeServer, fake_server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def server(shared_server: FakeServer) -> Iterator[FakeServer]:
    """A ready server; at the test's end no request is left and every page is back."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def client(server: FakeServer) -> httpx.Client:
    return server.client
