"""The files under test, read. Knows where they are and how they are written; judges nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"
PROMETHEUS = DEPLOY / "prometheus"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ("cpu", "nvidia", "autoscale", "monitoring", "tracing", "gateway")
ONLY_WITH_A_GPU = {"Device memory"}
"""Titles of panels."""


def documents(path: Path) -> list[Any]:
    """All documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of `recording.yaml` or `alerts.yaml`, without their groups."""
    (content,) = documents(PROMETHEUS / "rules" / name)
    return [rule for group in content["groups"] for rule in group["rules"]]


def dashboard() -> Any:
    """The dashboard, as Grafana reads it."""
    return json.loads((DEPLOY / "grafana" / "dashboards" / "ropewalk.json").read_text(encoding="utf-8"))


def without_variables(query: str, rate_interval: str = "5m") -> str:
    """A query of the dashboard, Grafana's variables filled in: every server, rates over `rate_interval`."""
    return re.sub(r"\$(job|namespace|instance)", ".*", query).replace("$__rate_interval", rate_interval)


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Titles of panels and their queries, Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], without_variables(target["expr"])


def settings_of(path: Path) -> dict[str, str]:
    """NAME=value lines of a file of environment variables."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
