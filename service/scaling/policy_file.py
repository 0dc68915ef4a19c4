"""The policy's options out of a file and of settings. Knows which of them wins; does not know what an option does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.config_files import read_named_values
from service.errors import StartupError
from service.problems import fields_at, innermost, shown, wanted
from service.scaling.options import RopePolicy
from service.suggest import did_you_mean


def load_options(file: Path | None, given: Mapping[str, Any]) -> RopePolicy:
    """The options of a policy file, each unless it is given apart.

    Args:
        file: .toml, .yaml or .yml; None for no file.
        given: options that win over the file's, checked already.

    Raises:
        StartupError: the file cannot be read, or a value in it is wrong; the message names file, option and value.
    """
    content = {} if file is None else read_named_values(file, kind="policy file")
    try:
        RopePolicy(**content)
    except ValidationError as error:
        problems = "; ".join(_describe(problem) for problem in innermost(error.errors()))
        raise StartupError(f"the policy file {file}: {problems}") from error
    return RopePolicy(**{**content, **given})


def _describe(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"]))
    if not name:
        return wanted(problem)
    *place, last = problem["loc"]
    fields = fields_at(RopePolicy, place)
    if problem["type"] == "extra_forbidden":
        return f"{name} is not an option{did_you_mean(last, fields) or '; known are ' + ', '.join(fields)}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    return f"{name}: {wanted(problem, fields_at(RopePolicy, problem['loc']))}, it is {shown(problem['input'])}"
