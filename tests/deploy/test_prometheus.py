"""A real Prometheus scrapes a real server under a short load: every panel of the dashboard shows something, every rule
evaluates."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.deploy.files import ONLY_WITH_A_GPU, dashboard, dashboard_queries, rules
from tests.deploy.prometheus import Prometheus, scraping
from tests.serving import MODEL, HttpServer, read_stream, real_server

SECONDS_UNTIL_ALL_IS_SEEN = 300
"""A guard against hanging: some scrapes and some evaluations, 15 s apart."""
FAULTS = {
    *("RopewalkNoReadyReplica", "RopewalkReplicaNotReady", "RopewalkEngineStuck"),
    *("RopewalkStepFailures", "RopewalkRequestsFailing", "RopewalkInternalErrors"),
}
NATIVE = 64

pytestmark = pytest.mark.long


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH (Debian: apt install prometheus)")
    return found


@pytest.fixture(name="server", scope="module")
def _server(embedded_model_folder: Path) -> Iterator[HttpServer]:
    with real_server(
        model=str(embedded_model_folder), native_length=NATIVE, max_model_len=256, kv_cache_memory="64MiB"
    ) as running:
        yield running


@pytest.fixture(name="prometheus", scope="module")
def _prometheus(server: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program("prometheus")
    with scraping(server.url, tmp_path_factory.mktemp("prometheus")) as running:
        yield running


def short_load(server: HttpServer) -> None:
    """Of everything that the dashboard looks at: a stream, a prompt seen before, a request that grows, a refusal."""
    client, start = server.client, "One two three four five six seven eight nine ten eleven twelve"
    body = {"prompt": start, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    read_stream(client, "/generate", body)
    assert client.post("/generate", json=body).status_code == 200
    assert client.post("/generate", json={**body, "max_tokens": NATIVE}).json()["rope"]["rerotations"] == 1
    assert client.post("/generate", json={**body, "model": MODEL}).status_code == 404


def test_every_panel_shows_something_and_every_recorded_value_is_there(
    server: HttpServer, prometheus: Prometheus
) -> None:
    """A rate takes a rise between two scrapes, so the load goes on until all has been seen."""
    missing = {
        query: title
        for title, query in dashboard_queries()
        if torch.cuda.is_available() or title not in ONLY_WITH_A_GPU
    }
    missing |= {rule["record"]: "recording.yaml" for rule in rules("recording.yaml")}
    end = time.monotonic() + SECONDS_UNTIL_ALL_IS_SEEN
    while missing:
        assert time.monotonic() < end, f"no data: {missing}"
        short_load(server)
        missing = {query: title for query, title in missing.items() if not prometheus.values(query)}
        time.sleep(3)


def test_the_server_is_found_as_the_job_that_the_rules_select(prometheus: Prometheus) -> None:
    (target,) = prometheus.get("targets")["activeTargets"]
    assert (target["labels"]["job"], target["health"], target["lastError"]) == ("ropewalk", "up", "")


@pytest.mark.parametrize("variable", ["job", "instance"])
def test_a_variable_of_the_dashboard_has_a_value(prometheus: Prometheus, variable: str) -> None:
    """`namespace` has none outside a cluster, and matches that too."""
    (chosen,) = [v for v in dashboard()["templating"]["list"] if v["name"] == variable]
    metric, label = chosen["query"]["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
    selector = metric.replace('"$job"', '".*"').replace('"$namespace"', '".*"')
    assert prometheus.get(f"label/{label}/values", **{"match[]": selector}) != []


@pytest.fixture(name="evaluated")
def _evaluated(prometheus: Prometheus) -> dict[str, tuple[str, str | None]]:
    """Every rule's health and last error, once each has been evaluated."""
    end = time.monotonic() + SECONDS_UNTIL_ALL_IS_SEEN
    while True:
        found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        outcomes = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in found}
        if all(health != "unknown" for health, _ in outcomes.values()):
            return outcomes
        assert time.monotonic() < end, outcomes
        time.sleep(1)


def test_every_rule_evaluates(evaluated: dict[str, tuple[str, str | None]]) -> None:
    declared = {rule["record"] for rule in rules("recording.yaml")} | {rule["alert"] for rule in rules("alerts.yaml")}
    assert evaluated.keys() == declared
    assert declared >= FAULTS
    assert {name: outcome for name, outcome in evaluated.items() if outcome != ("ok", None)} == {}


@pytest.mark.usefixtures("evaluated")
def test_a_server_that_is_well_raises_no_alert_of_faults(prometheus: Prometheus) -> None:
    """Nor does any wait to be raised. Those of speed and load depend on the machine that the test runs on."""
    raised = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    assert raised & FAULTS == set()


def test_promtool_finds_no_fault_with_the_metrics(server: HttpServer) -> None:
    short_load(server)
    exposed = server.client.get("/metrics")
    assert exposed.headers["content-type"].startswith("text/plain")
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=exposed.content, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
