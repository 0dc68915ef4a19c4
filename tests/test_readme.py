"""What the README says of settings, routes and schemes is what the program has."""

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from model_patches.geometry import RopeGeometry
from model_patches.loading.checkpoint import SUPPORTED_ARCHITECTURES
from model_patches.schemes import SCHEMES
from service.api import generating, health, models
from service.scaling.options import RopePolicy
from service.scaling.policy import Policy
from service.scaling.policy_file import load_options
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


def test_the_policy_file_shows_every_option_and_is_accepted(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(scheme: .*?)```", README, re.DOTALL)
    file = tmp_path / "policy.yaml"
    file.write_text(example, encoding="utf-8")
    options = load_options(file, {})
    assert options.model_fields_set == RopePolicy.model_fields.keys()
    geometry = RopeGeometry(rotary_dim=64, theta=1e5, original_length=8192, native_length=8192)
    policy = Policy(geometry, options)
    assert policy.ladder == (1.0, 1.5, 2.0, 4.0)
    assert policy.choose(4096, 10).mode == "native"


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_scheme_is_named(scheme: str) -> None:
    assert f"`{scheme}`" in README


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_architecture_is_named(architecture: str) -> None:
    assert architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") in README
