"""Pydantic's problems in plain words: none of its own wordings is left, whatever is wrong."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationError

from service.problems import SHOWN_VALUE_LENGTH, fields_at, innermost, shown, wanted


def refuse(_: int) -> int:
    raise ValueError("must be prime")


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inner: int | None = None
    other: int | None = Field(None, alias="renamed")


class Whole(BaseModel):
    flag: bool = False
    count: Annotated[int, Field(ge=1, le=5)] = 1
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    text: Annotated[str, Field(min_length=1)] = "a"
    words: Annotated[list[str], Field(min_length=1, max_length=2)] = []
    pair: tuple[int, ...] = ()
    table: dict[str, int] = {}
    kind: Literal["a", "b"] = "a"
    size: ByteSize = ByteSize(0)
    file: Path | None = None
    prime: Annotated[int, AfterValidator(refuse)] = 2
    part: Part | None = None
    parts: list[Part] = []
    either: str | list[Part] = ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("flag", "maybe", "must be a boolean (true or false)"),
        ("count", "x", "must be an integer"),
        ("count", None, "must be an integer"),
        ("count", 1.5, "must be an integer"),
        ("count", "9" * 5000, "must be an integer"),
        ("count", 0, "must be greater than or equal to 1"),
        ("count", 6, "must be less than or equal to 5"),
        ("share", "x", "must be a number"),
        ("share", "nan", "must be a finite number"),
        ("share", 0, "must be greater than 0"),
        ("share", 1, "must be less than 1"),
        ("text", 5, "must be a string"),
        ("text", "", "must have at least 1 character"),
        ("text", "\ud800", "must not have half of a surrogate pair"),
        ("words", "a", "must be a list"),
        ("words", [], "must have at least 1 item, not 0"),
        ("words", ["a"] * 3, "must have at most 2 items, not 3"),
        ("pair", 5, "must be a list"),
        ("table", 5, "must be an object"),
        ("kind", "c", "must be 'a' or 'b'"),
        ("size", "x", "must be a size in bytes (1000, 16MiB)"),
        ("size", "5 parsecs", "must be a size in bytes (1000, 16MiB)"),
        ("file", 5, "must be a path"),
        ("prime", 4, "must be prime"),
        ("part", 5, "must be an object with inner, renamed"),
        ("parts", 5, "must be a list"),
    ],
)
def test_every_kind_of_problem_is_a_plain_sentence(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Whole.model_validate({name: value})
    (problem,) = refusal.value.errors()
    assert wanted(problem, fields_at(Whole, problem["loc"])) == said


@pytest.mark.parametrize(
    ("location", "fields"),
    [
        ((), tuple(Whole.model_fields)),
        (("part",), ("inner", "renamed")),
        (("parts", 3), ("inner", "renamed")),
        (("either", "list[Part]", 0), ("inner", "renamed")),
        (("part", "inner"), ()),
        (("count",), ()),
    ],
)
def test_the_fields_of_a_part_are_found(location: tuple[str | int, ...], fields: tuple[str, ...]) -> None:
    assert fields_at(Whole, location) == fields


def test_a_value_is_shown_up_to_a_length() -> None:
    assert shown("x" * (SHOWN_VALUE_LENGTH - 2)) == repr("x" * (SHOWN_VALUE_LENGTH - 2))
    assert shown("x" * SHOWN_VALUE_LENGTH) == repr("x" * SHOWN_VALUE_LENGTH)[:SHOWN_VALUE_LENGTH] + "..."


def test_a_list_is_not_blamed_for_its_items() -> None:
    class Limited(BaseModel):
        numbers: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
        words: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)

    with pytest.raises(ValidationError) as refusal:
        Limited.model_validate({"numbers": ["x"], "words": []})
    assert [problem["loc"] for problem in innermost(refusal.value.errors())] == [("numbers", 0), ("words",)]
