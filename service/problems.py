"""What pydantic found wrong, in plain words.

Knows pydantic's kinds of problems and how models are nested. Does not know where a value was written, or by whom.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

SHOWN_VALUE_LENGTH = 100
KINDS = {
    "bool": "a boolean (true or false)",
    "byte": "a size in bytes (1000, 16MiB)",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "model": "an object",
    "path": "a path",
    "string": "a string",
    "tuple": "a list",
}
"""What a value had to be, by the first word of the problem's type."""
MISTYPED = re.compile(rf"({'|'.join(KINDS)})_(type|attributes_type|parsing|parsing_size|from_float|size|size_unit)")


def is_mistyped(problem: ErrorDetails) -> bool:
    """Whether the value is of another type than it should be, rather than out of a limit."""
    return MISTYPED.fullmatch(problem["type"]) is not None


def wanted(problem: ErrorDetails, fields: Sequence[str] = ()) -> str:
    """What the value must be, without the value: "must be an integer".

    Args:
        problem: one of a `ValidationError`.
        fields: of the object that it must be, if it must.
    """
    if found := MISTYPED.fullmatch(problem["type"]):
        kind = KINDS[found[1]]
        return f"must be {kind} with {', '.join(fields)}" if fields and kind == "an object" else f"must be {kind}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "string_unicode":
        return "must not have half of a surrogate pair"
    return re.sub(r"^\w+ should ", "must ", problem["msg"]).replace(" after validation", "")


def innermost(problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The problems that no other lies within: a list whose items are wrong is also said to have too few."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem, place in zip(problems, places, strict=True)
        if not any(len(other) > len(place) > 0 and other[: len(place)] == place for other in places)
    ]


def shown(value: Any) -> str:
    """A value as messages show it, not at any length."""
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[:SHOWN_VALUE_LENGTH] + "..."


def fields_at(model: type[BaseModel], location: Iterable[str | int]) -> tuple[str, ...]:
    """The names of the fields of that part of a model to which a problem's location leads; none if it is no model."""
    part: type[BaseModel] | None = model
    for step in location:  # places in lists, and pydantic's names for alternatives of a type, lead no deeper
        for name, field in part.model_fields.items() if part is not None else ():
            if step == (field.alias or name):
                part = next(_models_in(field.annotation), None)
                break
    return () if part is None else tuple(field.alias or name for name, field in part.model_fields.items())


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
