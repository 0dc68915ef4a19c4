"""The playground: one page at `/` that calls this server's own API, and the files that it is made of.

Knows paths and headers. Does not know what the page shows: that is in `static/`, served as it stands.
"""

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "static"
PREFIX = "/playground"
LONG_TEXT_PATH = f"{PREFIX}/long-text.txt"
PATHS = frozenset({"/", LONG_TEXT_PATH} | {f"{PREFIX}/{file.name}" for file in FOLDER.iterdir()})
"""Every path of the playground, none of which tells anything about the server."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The files of the page, each with its headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The answer to a request for one file.

        Raises:
            HTTPException: 404 there is no such file; 405 the method is neither GET nor HEAD.
        """
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_to(app: Starlette) -> None:
    """Serve the page and its files; GET and HEAD."""
    files = PageFiles(directory=FOLDER)

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.router.add_route("/", page, include_in_schema=False)
    app.router.add_route(LONG_TEXT_PATH, long_text, include_in_schema=False)
    app.mount(PREFIX, files)


def long_text(_: Request) -> Response:
    """Python's language reference as this Python's `help()` has it: 460,000 characters of real text."""
    from pydoc_data.topics import topics  # half a megabyte that only this needs, and that some systems leave out

    return PlainTextResponse("\n\n".join(topics[name] for name in sorted(topics)), headers=HEADERS)
