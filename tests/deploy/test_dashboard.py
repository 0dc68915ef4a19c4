"""The dashboard is one that Grafana can show, and that is found where it is looked for."""

import itertools
from typing import Any

from tests.deploy.files import DEPLOY, dashboard, documents

PANELS = dashboard()["panels"]


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The squares of Grafana's grid that a panel covers."""
    at = panel["gridPos"]
    return set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))


def test_panels_have_ids_titles_and_places_of_their_own() -> None:
    for key in ("id", "title"):
        assert len({panel[key] for panel in PANELS}) == len(PANELS)
    covered = [cell for panel in PANELS for cell in cells(panel)]
    assert len(covered) == len({*covered})
    assert all(0 <= x < 24 for x, _ in covered)


def test_a_panel_shows_something_and_says_what() -> None:
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["description"], panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_query_goes_to_the_chosen_source_and_replicas() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count('job=~"$job"') == target["expr"].count("ropewalk_") + target["expr"].count(
                "ropewalk:"
            )
    variables = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert variables == ["datasource", "job", "namespace", "instance"]


def test_compose_puts_it_where_grafana_is_told_to_look() -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"] if volume[0] == ".")
    (provider,) = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "ropewalk.yaml")
    assert mounts["./grafana/dashboards"] == provider["providers"][0]["options"]["path"]
    assert all((DEPLOY / source).exists() for source in mounts)
    (source,) = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
