"""With a key set, every path is closed but those that probes and scrapers ask."""

import logging
from collections.abc import Iterator
from hmac import compare_digest
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError

from service.api.auth import Keys, read_keys
from service.errors import StartupError
from service.settings import Settings
from tests.serving import MODEL, FakeServer, error_of, fake_server, read_stream

KEY = "s\u00e9same-1"
CLOSED = [
    ("POST", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/rope/plan"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake-model"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
    ("GET", "/metrics/"),
    ("GET", "/health/../v1/models"),
]


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeServer]:
    with fake_server(api_key=KEY) as running:
        yield running


def bearer(value: str) -> dict[bytes, bytes]:
    return {b"Authorization": value.encode()}


@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="no key"),
        pytest.param(bearer("Bearer wrong"), id="another key"),
        pytest.param(bearer(f"Bearer {KEY}x"), id="a longer key"),
        pytest.param(bearer(f"Bearer {KEY[:-1]}"), id="a shorter key"),
        pytest.param(bearer("Bearer"), id="an empty key"),
        pytest.param(bearer(KEY), id="the key without Bearer"),
        pytest.param(bearer(f"Basic {KEY}"), id="another method"),
    ],
)
def test_without_the_key_every_other_path_is_a_401_in_openais_shape(
    locked: FakeServer, method: str, path: str, headers: dict[bytes, bytes]
) -> None:
    response = locked.client.request(method, path, json={"prompt": "a"}, headers=headers)
    error = error_of(response)
    assert response.status_code == 401
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_and_scrapers_need_no_key(locked: FakeServer, path: str) -> None:
    assert locked.client.get(path).status_code == 200


def test_every_route_is_in_these_tests(locked: FakeServer) -> None:
    with locked.new_client(headers=bearer(f"Bearer {KEY}")) as client:
        routes = client.get("/openapi.json").json()["paths"]
    assert {route.replace("{name}", MODEL) for route in routes} <= {path for _, path in CLOSED} | {
        "/health",
        "/ready",
        "/metrics",
    }


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_key_requests_are_served(locked: FakeServer, scheme: str) -> None:
    with locked.new_client(headers=bearer(f"{scheme} {KEY}")) as client:
        assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert read_stream(client, "/v1/completions", {"prompt": "a", "max_tokens": 2}).done


def test_openais_client_is_let_in_with_the_key_and_knows_the_refusal() -> None:
    with fake_server(api_key="plain") as server:
        with server.openai("plain") as openai:
            assert openai.completions.create(model="fake-model", prompt="a", max_tokens=2).choices[0].text
        with server.openai("wrong") as openai, pytest.raises(AuthenticationError) as refusal:
            openai.completions.create(model="fake-model", prompt="a")
        assert refusal.value.code == "invalid_api_key"


def test_without_a_key_set_nothing_is_asked(client: httpx.Client) -> None:
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200


class TestMetricsNeedKey:
    @pytest.mark.parametrize("path", ["/health", "/ready"])
    def test_then_only_probes_need_none(self, path: str) -> None:
        with fake_server(api_key="k", metrics_need_key=True) as server:
            assert server.client.get(path).status_code == 200
            assert server.client.get("/metrics").status_code == 401
            assert server.client.get("/metrics", headers={"Authorization": "Bearer k"}).status_code == 200


FILE = """\
# the team
first-key
   second-key\t

  # nobody: old-key
k#y
s\u00e9same
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(FILE, encoding="utf-8")
    return path


def keys_of(file: Path, key: str | None = None) -> Keys:
    return Keys(Settings.model_validate({"api_key_file": file, "api_key": key}))


class TestKeyFile:
    def test_each_line_is_a_key_and_comments_are_none(self, file: Path) -> None:
        assert read_keys(file) == [b"first-key", b"second-key", b"k#y", "s\u00e9same".encode()]

    def test_all_its_keys_are_let_in_and_the_one_of_the_settings(self, file: Path) -> None:
        with fake_server(api_key="own", api_key_file=file) as server:
            for key, status in (
                *((key, 200) for key in ("own", "first-key", "second-key", "k#y", "s\u00e9same")),
                *((key, 401) for key in ("# the team", "old-key", "first-key second-key", "third")),
            ):
                assert server.client.get("/v1/models", headers=bearer(f"Bearer {key}")).status_code == status, key

    @pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe\x00", None])
    def test_without_a_key_in_it_nothing_starts(self, file: Path, content: bytes | None) -> None:
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(StartupError, match=str(file)):
            keys_of(file)
        with pytest.raises(StartupError, match=str(file)):
            keys_of(file, "own")

    def test_read_again_it_counts_from_then_on(self, file: Path, caplog: pytest.LogCaptureFixture) -> None:
        with fake_server(api_key="own", api_key_file=file) as server:

            def status(key: str) -> int:
                return server.client.get("/v1/models", headers=bearer(f"Bearer {key}")).status_code

            file.write_text("third-key\nfirst-key\n")
            assert status("third-key") == 401
            with caplog.at_level(logging.INFO):
                server.app.state.keys.reload()
            assert "3" in caplog.records[-1].getMessage()
            assert [status(key) for key in ("own", "first-key", "second-key", "third-key")] == [200, 200, 401, 200]

    @pytest.mark.parametrize("content", [b"# all gone\n", b"\xff", None])
    def test_if_it_cannot_be_read_again_the_old_keys_stay(
        self, file: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = keys_of(file)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        keys.reload()
        assert keys.find(b"first-key")
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith(f"the keys stay as they were: the key file {file} ")
        assert "first-key" not in line


@pytest.mark.parametrize("given", [b"own", b"first-key", "s\u00e9same".encode(), b"wrong", b""])
def test_a_key_is_compared_with_every_key_whichever_is_right(
    file: Path, given: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(file, "own")
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return compare_digest(left, right)

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert (keys.find(given) is None) == (given in (b"wrong", b""))
    assert compared == [(32, 32)] * 5


def test_keys_have_names_that_tell_them_apart_and_not_what_they_are(file: Path) -> None:
    keys = keys_of(file)
    first, second = keys.find(b"first-key"), keys.find(b"second-key")
    assert first != second
    assert b"first" not in (first or b"")
    keys.reload()
    assert keys.find(b"first-key") == first
