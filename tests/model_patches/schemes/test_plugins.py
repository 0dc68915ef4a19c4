"""Schemes of other packages are found, are served like built-in ones, and are refused in words where they are broken.

Each package here is a module and its metadata in a folder on sys.path, which is what pip makes of one.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_patches.errors import UnsupportedModelError
from model_patches.geometry import RopeGeometry
from model_patches.plan import make_plan
from model_patches.schemes import SCHEMES, known_schemes, schemes_for

PLAIN = RopeGeometry(rotary_dim=8, theta=1e4, original_length=2048, native_length=2048)
HALVING = """
import numpy as np

def halving(geometry, factor, length):
    return np.full(geometry.rotary_dim // 2, 0.5 / factor), 1.0 + length / 4096
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package of one module; `entry_points` are lines of its group `ropewalk.schemes`."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def write(module: str, code: str, *entry_points: str, distribution: str | None = None) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        metadata = tmp_path / f"{module}-1.2.dist-info"
        metadata.mkdir()
        name = distribution or module.replace("_", "-")
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text("\n".join(["[ropewalk.schemes]", *entry_points, ""]))
        modules.append(module)
        importlib.invalidate_caches()
        known_schemes.cache_clear()

    yield write
    for module in modules:
        sys.modules.pop(module, None)
    known_schemes.cache_clear()


def test_without_any_the_schemes_are_those_built_in() -> None:
    known_schemes.cache_clear()
    assert dict(known_schemes()) == SCHEMES


def test_an_installed_scheme_is_known_and_makes_plans(install: Install) -> None:
    install("halving_rope", HALVING, "halving = halving_rope:halving")
    assert set(known_schemes()) == SCHEMES.keys() | {"halving"}
    assert "halving" not in SCHEMES
    assert "halving" in schemes_for(PLAIN)
    plan = make_plan(PLAIN, "halving", 2.0, 4096)
    assert (plan.scheme, plan.inv_freq, plan.attention_factor) == ("halving", (0.25,) * 4, 2.0)


def test_an_installed_scheme_can_be_a_models_own(install: Install) -> None:
    code = HALVING.replace("0.5 / factor", "geometry.options('halving')['start'] / factor")
    install("halving_rope", code, "halving = halving_rope:halving")
    native = RopeGeometry(8, 1e4, 2048, 8192, "halving", 4.0, {"start": 0.75})
    assert "halving" in schemes_for(native)
    assert make_plan(native, "halving", 4.0, 8192).inv_freq == (0.1875,) * 4


def test_two_packages_with_two_schemes(install: Install) -> None:
    install("one_rope", HALVING, "one = one_rope:halving", "two = one_rope:halving")
    install("other_rope", HALVING, "three = other_rope:halving")
    assert set(known_schemes()) == SCHEMES.keys() | {"one", "two", "three"}


def test_packages_are_looked_for_once(install: Install) -> None:
    install("halving_rope", HALVING, "halving = halving_rope:halving")
    first = known_schemes()
    sys.modules.pop("halving_rope")
    assert known_schemes() is first
    assert "halving_rope" not in sys.modules


def test_what_is_known_cannot_be_changed(install: Install) -> None:
    install("halving_rope", HALVING, "halving = halving_rope:halving")
    with pytest.raises(TypeError):
        known_schemes()["yarn"] = known_schemes()["halving"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("code", "entry_point", "reason"),
    [
        pytest.param("", "odd = odd_rope:nothing", r"imported \(AttributeError: .*nothing", id="no such function"),
        pytest.param("", "odd = no_such_module:f", r"imported \(ModuleNotFoundError: .*no_such_mod", id="no module"),
        pytest.param("1 / 0", "odd = odd_rope:f", r"imported \(ZeroDivisionError", id="import fails"),
        pytest.param("def f(:", "odd = odd_rope:f", r"imported \(SyntaxError", id="not Python"),
        pytest.param("f = 3", "odd = odd_rope:f", "it is not a function but 3", id="not callable"),
        pytest.param(HALVING, "yarn = odd_rope:halving", "a built-in scheme has that name", id="built-in name"),
        pytest.param(HALVING, "clex = odd_rope:halving", "a built-in scheme has that name", id="newer built-in name"),
    ],
)
def test_a_broken_one_is_refused_by_name_and_reason(install: Install, code: str, entry_point: str, reason: str) -> None:
    install("odd_rope", code, entry_point, distribution="Odd-Ropes")
    name, value = entry_point.split(" = ")
    expected = rf"scheme '{name}' of the package 'Odd-Ropes' \(entry point '{value}'\) cannot be used: .*{reason}"
    with pytest.raises(UnsupportedModelError, match=expected):
        known_schemes()
    with pytest.raises(UnsupportedModelError, match=expected):
        schemes_for(PLAIN)
    with pytest.raises(UnsupportedModelError, match=expected):
        make_plan(PLAIN, "default", 1.0, 2048)


def test_two_packages_cannot_have_one_name(install: Install) -> None:
    install("first_rope", HALVING, "same = first_rope:halving")
    install("second_rope", HALVING, "same = second_rope:halving")
    with pytest.raises(UnsupportedModelError, match=r"package '(first|second)-rope' has a scheme of that name too"):
        known_schemes()


def test_what_an_installed_scheme_returns_is_checked(install: Install) -> None:
    install("halving_rope", HALVING.replace("// 2", "// 2 + 1"), "halving = halving_rope:halving")
    with pytest.raises(UnsupportedModelError, match=r"scheme 'halving' returned inverse frequencies of shape \(5,\)"):
        make_plan(PLAIN, "halving", 2.0, 4096)
