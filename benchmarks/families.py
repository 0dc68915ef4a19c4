"""What is served of published models where nothing is configured, as a Markdown table.

    python -m benchmarks.families > benchmarks/families.md

Reads the configs that the tests hold (`tests/model_patches/families.py`) as a server would; needs no weights.
"""

from collections.abc import Iterator

from model_patches.geometry import RopeGeometry
from model_patches.rope_config import read_geometry
from service.scaling.policy import Policy
from tests.model_patches.families import FAMILIES, Family

COLUMNS = (
    *("model", "scheme in config.json", "native length", "native plan", "maximum length", "ladder"),
    *("rotary dimension of head", "layout", "base of windowed layers"),
)


def main() -> None:
    """Print the table."""
    print("# Published models as they are served where nothing is configured\n")
    print(
        "By `python -m benchmarks.families`. Lengths in tokens; the factors of a ladder are in native lengths, except"
    )
    print("where the only rung is the model's own plan.\n")
    print(_line(COLUMNS))
    print(_line("---" for _ in COLUMNS))
    for family in FAMILIES:
        print(_line(_cells(family)))


def _cells(family: Family) -> Iterator[str]:
    geometry = read_geometry(family.config)
    policy = Policy(geometry)
    yield family.name
    yield _plan(read_geometry(family.config, "config")) + (", a ceiling" if geometry.configured_scheme else "")
    yield f"{policy.native_length:,}"
    yield _plan(geometry)
    yield f"{policy.max_length:,}"
    yield ", ".join(f"{factor:g}" for factor in policy.ladder)
    yield f"{geometry.rotary_dim} of {family.expected.head_dim}"
    yield geometry.layout
    yield "" if geometry.local is None else f"{geometry.local.theta:,g}"


def _plan(geometry: RopeGeometry) -> str:
    return "unscaled" if geometry.scheme == "default" else f"{geometry.scheme} {geometry.factor:g}"


def _line(cells: Iterator[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
