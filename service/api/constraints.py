"""From a request's fields to the grammar that its text must match. Does not compile it."""

from typing import Any, NamedTuple

from service.api.requests import JsonSchema, ResponseFormat, SamplingFields, StructuredOutputs
from service.engine.grammar import GrammarSpec
from service.errors import RequestError

COMPILER_OPTIONS = "x-guidance"  # a key of a schema that changes how it is read, not what it says


class Constraint(NamedTuple):
    """What the text must match, and the field that says so."""

    spec: GrammarSpec
    param: str


def constraint_of(fields: SamplingFields) -> Constraint | None:
    """The one constraint of a request, if it has any.

    Raises:
        RequestError: it has two, or one that is not complete.
    """
    formatted = None if fields.response_format is None else _formatted(fields.response_format)
    structured = None if fields.structured_outputs is None else _structured(fields.structured_outputs)
    if formatted is not None and structured is not None:
        raise RequestError(
            "structured_outputs: response_format constrains the text already: give one", param="structured_outputs"
        )
    return formatted or structured


def _formatted(wanted: ResponseFormat) -> Constraint | None:
    param = "response_format.json_schema"
    match wanted.type, wanted.json_schema:
        case "text", None:
            return None
        case "json_object", None:
            return Constraint(GrammarSpec.json_object(), "response_format")
        case "json_schema", JsonSchema(schema_=schema):
            return Constraint(_schema(schema, f"{param}.schema"), f"{param}.schema")
        case "json_schema", None:
            raise RequestError(f"{param} is missing", param=param)
        case kind, _:
            raise RequestError(f"{param}: goes only with type json_schema, it is {kind}", param=param)


def _structured(wanted: StructuredOutputs) -> Constraint:
    schema, regex, choice, grammar = wanted.json_, wanted.regex, wanted.choice, wanted.grammar
    param = "structured_outputs"
    kinds = {"json": schema, "regex": regex, "choice": choice, "grammar": grammar}
    given = [kind for kind, value in kinds.items() if value is not None]
    if len(given) != 1:
        message = f"{param}: give one of {', '.join(kinds)}, not {' and '.join(given) or 'none'}"
        raise RequestError(message, param=param)
    param = f"{param}.{given[0]}"
    if schema is not None:
        return Constraint(_schema(schema, param), param)
    if regex is not None:
        return Constraint(GrammarSpec.regex(regex), param)
    if choice is not None:
        return Constraint(GrammarSpec.choice(choice), param)
    assert grammar is not None
    return Constraint(GrammarSpec.grammar(grammar), param)


def _schema(schema: dict[str, Any], param: str) -> GrammarSpec:
    if COMPILER_OPTIONS in schema:
        raise RequestError(f"{param}: {COMPILER_OPTIONS} is not supported", param=param)
    try:
        return GrammarSpec.json_schema(schema)
    except RecursionError:
        raise RequestError(f"{param}: it is nested too deeply", param=param) from None
