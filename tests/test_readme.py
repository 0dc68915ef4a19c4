"""What the README says of settings, routes and schemes is what the program has."""

from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.schemes import SCHEMES
from service.api import generating, health, models
from service.settings import Settings

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "model"])
def test_every_setting_has_its_row(name: str) -> None:
    field = Settings.model_fields[name]
    default = "" if field.default is None else f"`{field.default}`"
    assert f"| `--{name.replace('_', '-')}` | {default} | {field.description} |" in README


@pytest.mark.parametrize(
    "path",
    [
        route.path
        for router in (generating.router, models.router, health.router)
        for route in router.routes
        if isinstance(route, APIRoute)
    ],
)
def test_every_route_is_named(path: str) -> None:
    assert path.replace("{name:path}", "{id}") in README


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_is_named(scheme: str) -> None:
    assert f"`{scheme}`" in README


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_architecture_is_named(architecture: str) -> None:
    assert architecture.removesuffix("ForCausalLM") in README
