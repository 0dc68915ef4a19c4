"""The page at `/`: its files come from here alone, with a strict policy, without a key, and only where it is wanted."""

import json
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest

from service.playground.page import FOLDER, PATHS
from tests.serving import FakeServer, error_of, fake_server

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = sorted(file for file in FOLDER.iterdir())
XML_NAMES = {"http://www.w3.org/2000/svg"}
"""Names of XML, which nobody fetches."""


class Elements(HTMLParser):
    """The elements of a page: their names, attributes and, of scripts and styles, what stands in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


@pytest.fixture(scope="module")
def page() -> Elements:
    return Elements((FOLDER / "index.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeServer]:
    with fake_server(api_key="k", metrics_need_key=True) as running:
        yield running


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_file_has_its_type_and_the_pages_headers(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 200
    expected = "text/plain" if path.endswith(".txt") else TYPES[Path(path).suffix or ".html"]
    assert response.headers["content-type"].partition(";")[0] == expected
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'self'",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors", "object-src"), "'none'"),
    }
    assert (response.content == b"") == (method == "HEAD")
    assert int(response.headers["content-length"]) > 0


def test_a_file_that_has_not_changed_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_names_another_host(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"""(?:\w+:)?//[\w.-]+\.[^\s"'`)>]*""", text)) <= XML_NAMES


def test_what_the_page_refers_to_is_served_and_nothing_stands_in_it(client: httpx.Client, page: Elements) -> None:
    references = [
        value for _, attributes in page.found for name, value in attributes.items() if name in ("src", "href")
    ]
    assert len(references) >= 3
    for reference in references:
        assert reference is not None
        assert client.get(f"/{reference}").status_code == 200
    assert page.inline == ""
    assert not [name for _, attributes in page.found for name in attributes if name == "style" or name[:2] == "on"]


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".js"], ids=lambda file: file.name)
def test_every_import_is_one_of_the_files(file: Path) -> None:
    imported = re.findall(r'from "(.*?)"', file.read_text(encoding="utf-8"))
    assert all(name.startswith("./") for name in imported)
    assert {FOLDER / name for name in imported} <= set(FILES)


def test_scripts_ask_for_elements_that_the_page_has(page: Elements) -> None:
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    scripts = "".join(file.read_text(encoding="utf-8") for file in FILES if file.suffix == ".js")
    asked = set(re.findall(r'(?:getElementById|show)\("([\w-]+)"', scripts))
    assert len(asked) > 10
    assert asked <= ids


def test_every_field_has_a_label(page: Elements) -> None:
    labelled = {attributes.get("for") for tag, attributes in page.found if tag == "label"}
    fields = {attributes["id"] for tag, attributes in page.found if tag in ("input", "select", "textarea")}
    assert len(fields) >= 6
    assert fields == labelled


def test_the_long_text_is_pythons_own_reference(client: httpx.Client) -> None:
    text = client.get("/playground/long-text.txt").text
    assert all(topics[name] in text for name in ("assert", "yield"))
    assert len(text) > 400_000


@pytest.mark.parametrize("path", ["/playground/none.js", "/playground/", "/playground/../page.py"])
def test_there_is_nothing_else_there(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/", "/playground/main.js", "/playground/long-text.txt"])
def test_it_is_only_read(client: httpx.Client, path: str) -> None:
    response = client.post(path, json={})
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")


def test_the_apis_description_does_not_tell_of_it(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    assert not PATHS & set(description["paths"])
    assert "playground" not in json.dumps(description["paths"])


@pytest.mark.parametrize("path", sorted(PATHS))
def test_it_needs_no_key_where_everything_else_does(locked: FakeServer, path: str) -> None:
    assert locked.client.get(path).status_code == 200
    assert locked.client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", ["/playground", "/playground/", "/playground/none.js", "/playground/../v1/models"])
def test_what_is_not_a_file_of_it_stays_closed(locked: FakeServer, path: str) -> None:
    assert locked.client.get(path).status_code == 401


@pytest.mark.parametrize(("settings", "status"), [({}, 404), ({"api_key": "k"}, 401)])
def test_switched_off_it_is_gone(settings: dict[str, Any], status: int) -> None:
    with fake_server(playground=False, **settings) as server:
        for path in PATHS:
            assert server.client.get(path).status_code == status


def test_an_installation_has_the_files() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    [pattern] = project["tool"]["setuptools"]["package-data"]["service.playground"]
    assert sorted(FOLDER.parent.glob(pattern)) == FILES
