"""What YAML would pass over in silence is refused. What else a file may hold is tested with those who read it."""

from pathlib import Path

import pytest

from service.config_files import read_named_values
from service.errors import StartupError


@pytest.mark.parametrize(
    ("name", "text", "twice"),
    [
        ("f.yaml", "port: 1\nhost: a\nport: 2\n", "port"),
        ("f.yml", "port: 1\n'port': 1\n", "port"),
        ("f.yaml", "ladder:\n  - {factor: 2, factor: 4}\n", "factor"),
        ("f.yaml", "a: &a {b: 1}\nc: {<<: *a, <<: *a}\n", "<<"),
    ],
)
def test_a_name_that_is_written_twice_is_refused(tmp_path: Path, name: str, text: str, twice: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError, match=rf"f\.ya?ml cannot be read: {twice} is written twice .*line \d") as refusal:
        read_named_values(tmp_path / name, kind="file")
    assert "\n" not in str(refusal.value)


def test_toml_refuses_it_too(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("port = 1\nport = 2\n")
    with pytest.raises(StartupError, match="cannot be read"):
        read_named_values(tmp_path / "f.toml", kind="file")


def test_names_of_different_parts_and_merged_ones_may_be_alike(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: *a\n")
    assert read_named_values(tmp_path / "f.yaml", kind="file") == {
        **{"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}},
        "c": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize("text", ["? [a, b]\n: 1\n", "? {a: 1}\n: 1\n", "!!map a\n", "!!map [a]\n"])
def test_what_is_no_name_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(StartupError, match="cannot be read"):
        read_named_values(tmp_path / "f.yaml", kind="file")
