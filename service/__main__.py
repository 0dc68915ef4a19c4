"""The command line: `ropewalk` and `python -m service`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

from service.cli import add_settings
from service.errors import RopewalkError
from service.scaling.wish import Growth, Mode
from service.settings import ROPE_OPTIONS


def main(argv: list[str] | None = None) -> None:
    """Run one command. An error that the user can mend ends in one line on stderr and exit status 2."""
    arguments = vars(_parser().parse_args(argv))
    try:
        _command(arguments["command"])(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough of it, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python flushes once more as it ends
        sys.exit(1)
    except RopewalkError as error:
        print(f"ropewalk: error: {error}", file=sys.stderr)
        sys.exit(2)


def _command(name: str) -> Callable[[Mapping[str, Any]], None]:
    """What a command does. Imported only now: torch takes seconds, and not every command needs it."""
    match name:
        case "serve":
            from service.commands.serve import serve

            return serve
        case "plan":
            from service.commands.plan import plan

            return plan
        case "fetch-default":
            from service.commands.fetch_default import fetch_default

            return fetch_default
    raise AssertionError(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ropewalk",
        allow_abbrev=False,
        description="Serve RoPE language models, each request under the positional scaling that its length needs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        allow_abbrev=False,
        epilog="Every option is also an environment variable: ROPEWALK_MAX_RUNNING for --max-running.",
    )
    add_settings(serve)
    plan = commands.add_parser(
        "plan", help="show the positional plan that a request would get, without weights", allow_abbrev=False
    )
    # --growth is the request's wish here, which says all that the setting of this name would.
    add_settings(plan, only=("revision", "rope_policy", *(set(ROPE_OPTIONS.values()) - {"growth"})))
    plan.add_argument("--prompt-tokens", type=int, required=True, metavar="N", help="the prompt's length")
    plan.add_argument("--max-tokens", type=int, metavar="M", help="tokens to generate; default: all that remains")
    plan.add_argument("--scheme", help="as a request may ask for")
    plan.add_argument("--factor", type=float, help="as a request may ask for")
    plan.add_argument("--mode", choices=get_args(Mode), help="as a request may ask for")
    plan.add_argument("--growth", choices=get_args(Growth), dest="wished_growth", help="as a request may ask for")
    plan.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("fetch-default", help="download and convert the embedded default model")
    return parser


if __name__ == "__main__":
    main()
