"""Every alert is documented and tested; the tests of the rules themselves are promtool's and run here."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.prometheus_rule import HEADER, prometheus_rule
from tests.deploy.files import DOCS, KUBERNETES, PROMETHEUS, ROOT, dashboard_queries, documents, rules

ALERTS = {rule["alert"]: rule for rule in rules("alerts.yaml")}
TEST_FILES = sorted((PROMETHEUS / "tests").glob("*.yaml"))
CASES = [case for file in TEST_FILES for content in documents(file) for case in content["tests"]]


@pytest.fixture(name="promtool", scope="session")
def _promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH (Debian: apt install prometheus)")
    return found


def cases_of(alert: str) -> list[bool]:
    """Of each case of an alert, whether it expects it to fire."""
    return [bool(t["exp_alerts"]) for case in CASES for t in case["alert_rule_test"] if t["alertname"] == alert]


def check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    assert {*cases_of(alert)} == {True, False}


def test_a_case_says_what_it_expects() -> None:
    for case in CASES:
        (test,) = case["alert_rule_test"]
        outcome = "fires" if test["exp_alerts"] else "silent"
        assert case["name"].startswith(f"{outcome}, {test['alertname']}, ")


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_has_a_paragraph_in_the_runbook(alert: str) -> None:
    path, anchor = ALERTS[alert]["annotations"]["runbook"].split("#")
    assert anchor == alert.lower()
    (paragraph,) = re.findall(
        rf"^### {alert}\n\n(.+?)(?=\n\n|\Z)", (ROOT / path).read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(paragraph) > 150


def test_the_runbook_has_no_other_alerts() -> None:
    headings = re.findall(r"^### (\w+)$", (DOCS / "troubleshoot.md").read_text(encoding="utf-8"), re.M)
    assert sorted(headings) == sorted(ALERTS)
    text = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert {*re.findall(r"\bRopewalk[A-Z]\w+", text)} == ALERTS.keys()


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_says_who_should_look_when(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    (row,) = [
        line
        for line in (DOCS / "monitor.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `Ropewalk") and f"`{alert}`" in line
    ]
    assert row.split("|")[2].strip() == rule["labels"]["severity"]


def test_burn_rates_look_at_a_long_and_a_short_window() -> None:
    for alert in ("RopewalkFirstTokenLate", "RopewalkInterTokenLate"):
        windows = re.findall(r"ratio_rate(\w+) > ([\d.]+) \* 0\.05", ALERTS[alert]["expr"])
        assert windows == [("1h", "14.4"), ("5m", "14.4"), ("6h", "6"), ("30m", "6")]


def test_a_stuck_engine_is_told_before_it_is_restarted() -> None:
    from service.settings import Settings

    (seconds,) = re.findall(r"under_way_seconds > (\d+)", ALERTS["RopewalkEngineStuck"]["expr"])
    assert int(seconds) < Settings.model_fields["step_timeout_seconds"].default


def test_the_operator_gets_the_same_rules() -> None:
    file = KUBERNETES / "components" / "monitoring" / "prometheusrule.yaml"
    assert file.read_text(encoding="utf-8").startswith(HEADER)
    assert documents(file) == [prometheus_rule()]
    groups = [group for name in ("alerts", "recording") for group in _groups(name)]
    assert prometheus_rule()["spec"]["groups"] == groups


def _groups(name: str) -> list[Any]:
    (content,) = documents(PROMETHEUS / "rules" / f"{name}.yaml")
    groups: list[Any] = content["groups"]
    return groups


@pytest.mark.long
def test_the_rules_are_valid(promtool: str) -> None:
    check([promtool, "check", "rules", *map(str, sorted((PROMETHEUS / "rules").glob("*.yaml")))])


@pytest.mark.long
def test_the_scrape_configuration_is_valid(promtool: str) -> None:
    check([promtool, "check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yaml")])


@pytest.mark.long
@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: file.stem)
def test_the_alerts_do_what_their_cases_say(file: Path, promtool: str) -> None:
    check([promtool, "test", "rules", str(file)])


@pytest.mark.long
def test_the_queries_of_the_dashboard_are_valid(promtool: str, tmp_path: Path) -> None:
    """promtool reads rules, so each query is made one."""
    queries = [{"record": f"panel:query{n}", "expr": query} for n, (_, query) in enumerate(dashboard_queries())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": queries}]}), encoding="utf-8")
    check([promtool, "check", "rules", str(file)])
