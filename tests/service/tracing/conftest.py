"""A server on the fake model that is traced; a test makes its requests and looks at what was recorded."""

from collections.abc import Iterator

import pytest

from tests.service.tracing.recording import Recording
from tests.serving import MODEL, FakeServer, fake_server


@pytest.fixture
def recording() -> Recording:
    return Recording(MODEL)


@pytest.fixture
def server(recording: Recording) -> Iterator[FakeServer]:
    prepared = fake_server(prefix_caching=True, max_output_tokens=100)
    recording.attach(prepared)
    with prepared as running:
        yield running
        running.wait_until_idle()
