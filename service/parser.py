"""The parser of the command line: as argparse has it, but whatever is wrong is said in one line, with what was
probably meant. Knows argparse; does not know which commands and options there are.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from service.errors import StartupError
from service.suggest import did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises StartupError where argparse would print its usage and exit."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # a command's parser sees its own first, and knows what they may be
            name = unknown[0].partition("=")[0]
            what = "an option" if name.startswith("-") else "an argument"
            raise StartupError(f"{name} is not {what} of {self.prog}{did_you_mean(name, self._option_string_actions)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        name, choices = "/".join(action.option_strings) or action.metavar, list(action.choices)
        raise StartupError(
            f"{name}: must be one of {', '.join(choices)}, it is {value!r}{did_you_mean(str(value), choices)}"
        )


class Version(argparse.Action):
    """Prints the installed version, which is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"ropewalk {version('ropewalk')}")
        parser.exit()


def at_least(least: int) -> Callable[[str], int]:
    """What reads an option's value: a whole number that is no smaller."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"it must be at least {least}, it is {value}")
        return value

    return convert
