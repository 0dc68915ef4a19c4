"""The command line: `ropewalk` and `python -m service`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args

from service import process
from service.bench.options import add_options
from service.cli import add_settings
from service.environment import check_variables
from service.errors import RopewalkError
from service.evaluation.options import add_calibrate_options, add_eval_options
from service.parser import Parser, Version
from service.scaling.wish import Growth, Mode
from service.settings import ROPE_OPTIONS, Settings


def main(argv: list[str] | None = None) -> None:
    """Run one command. An error that the user can mend ends in one line on stderr and exit status 2."""
    process.set_up()
    try:
        arguments = vars(_parser().parse_args(argv))
        check_variables(os.environ, Settings.model_fields)
        command = _command(arguments["command"])
        process.settle()
        command(arguments)
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
        case "bench":
            from service.commands.bench import bench

            return bench
        case "eval":
            from service.commands.eval import evaluate

            return evaluate
        case "calibrate":
            from service.commands.calibrate import calibrate

            return calibrate
        case "fetch-default":
            from service.commands.fetch_default import fetch_default

            return fetch_default
        case "build-operators":
            from service.commands.build_operators import build_operators

            return build_operators
    raise AssertionError(name)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ropewalk",
        allow_abbrev=False,
        description="Serve RoPE language models, each request under the positional scaling that its length needs.",
    )
    parser.add_argument("--version", action=Version, help="print the version and exit")
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
    add_options(commands.add_parser("bench", help="measure how fast a server is", allow_abbrev=False))
    add_eval_options(
        commands.add_parser("eval", help="measure what positional scaling does to answers", allow_abbrev=False)
    )
    add_calibrate_options(
        commands.add_parser("calibrate", help="write the policy that fits a model and texts best", allow_abbrev=False)
    )
    commands.add_parser("fetch-default", help="download and convert the embedded default model")
    commands.add_parser("build-operators", help="compile the C++ operators, which a first start does otherwise")
    return parser


if __name__ == "__main__":
    main()
