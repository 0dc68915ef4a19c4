"""Every name that is sent is one of the conventions' or the server's own, and is in the docs."""

from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, http_attributes

from service.api import generating
from service.tracing import names

SENT = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str) and "." in value}
CONVENTIONS = {
    value
    for module in (gen_ai_attributes, gen_ai_metrics, error_attributes, http_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
MONITOR = (Path(__file__).parents[3] / "docs" / "monitor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(SENT))
def test_a_name_is_the_conventions_or_our_own_and_documented(name: str) -> None:
    assert name.startswith("ropewalk.") or name in CONVENTIONS
    assert f"`{name}`" in MONITOR


def test_every_generating_route_is_traced() -> None:
    assert {route.path for route in generating.router.routes if hasattr(route, "path")} == names.OPERATIONS.keys()


def test_operations_have_the_conventions_names() -> None:
    known = {value.value for value in gen_ai_attributes.GenAiOperationNameValues}
    assert {*names.OPERATIONS.values()} <= known
