"""A real Prometheus (Debian: apt install prometheus) that scrapes one server by the deployed configuration. Knows how
to start it and how to ask it; judges nothing."""

import math
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.files import PROMETHEUS, documents


@dataclass(frozen=True)
class Series:
    """One series of a query's answer over a range.

    Attributes:
        labels: that tell it from the others.
        times: seconds since 1970.
        values: one for each time; NaN where a query divides nothing by nothing.
    """

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Prometheus:
    """A running Prometheus, asked through its HTTP API."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def values(self, query: str) -> list[float]:
        """The numbers that a query gives now; NaN, which is no number, is left out."""
        found = [float(sample["value"][1]) for sample in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]

    def series(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """What a query gives from one time (seconds since 1970) to another, every `step` seconds."""
        found = self.get("query_range", query=query, start=str(start), end=str(end), step=str(step))["result"]
        return [
            Series(one["metric"], [time for time, _ in one["values"]], [float(value) for _, value in one["values"]])
            for one in found
        ]


@contextmanager
def scraping(url: str, folder: Path, seconds: int | None = None) -> Iterator[Prometheus]:
    """A Prometheus whose configuration is the deployed one; only the addresses of the server and of the rules' folder
    differ.

    Args:
        url: of the server that it scrapes.
        folder: for its configuration, data and log.
        seconds: between two scrapes, and two evaluations of a group of rules that names no interval; None leaves
            what is deployed.

    Raises:
        FileNotFoundError: there is no `prometheus` on the PATH.
    """
    (config,) = documents(PROMETHEUS / "prometheus.yaml")
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yaml")]
    if seconds is not None:
        config["global"] |= {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"}
        job |= {"scrape_timeout": f"{seconds}s"}
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client,
    ):
        try:
            prometheus = Prometheus(client)
            while not prometheus.is_ready():
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
            yield prometheus
        finally:
            process.terminate()
