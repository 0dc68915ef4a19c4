"""The tables of supported architectures and published models are what the tests run."""

import re
from pathlib import Path

from benchmarks import families

ROOT = Path(__file__).parents[2]


def test_the_written_tables_are_those_of_the_tests() -> None:
    assert (ROOT / "benchmarks" / "families.md").read_text(encoding="utf-8") == families.document()


def test_the_readme_has_the_table_of_supported_architectures() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"<!-- supported architectures -->\n\n(.*?)\n\n<!-- end -->", readme, re.DOTALL)
    assert table == families.supported()
