"""The three services of the compose file fit each other and the files that they mount."""

import re

from service.commands.serve import SECONDS_FOR_LAST_WORDS
from tests.deploy.files import DEPLOY, PROMETHEUS, ROOT, documents

(COMPOSE,) = documents(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]


def test_the_grace_is_longer_than_the_drain() -> None:
    server = SERVICES["ropewalk"]
    (grace,) = re.findall(r"^(\d+)s$", server["stop_grace_period"])
    drain = int(server["environment"]["ROPEWALK_SHUTDOWN_SECONDS"])
    assert drain + SECONDS_FOR_LAST_WORDS < int(grace)


def test_the_image_is_a_target_of_the_dockerfile() -> None:
    build = SERVICES["ropewalk"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert build["target"] in stages
    assert SERVICES["ropewalk"]["image"] == f"ropewalk:{build['target']}"


def test_prometheus_scrapes_the_server_and_reads_the_rules() -> None:
    (config,) = documents(PROMETHEUS / "prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "ropewalk"  # what the rules select
    assert job["static_configs"] == [{"targets": ["ropewalk:8000"]}]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["prometheus"]["volumes"] if volume[0] == ".")
    assert config["rule_files"] == [mounts["./prometheus/rules"] + "/*.yaml"]
    assert f"--config.file={mounts['./prometheus/prometheus.yaml']}" in SERVICES["prometheus"]["command"]
    assert all((DEPLOY / source).exists() for source in mounts)


def test_prometheus_in_a_cluster_finds_the_same_job() -> None:
    (config,) = documents(PROMETHEUS / "prometheus-kubernetes.yaml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "ropewalk"
    assert {rule.get("target_label") for rule in job["relabel_configs"]} >= {"namespace", "pod"}


def test_nothing_listens_on_all_addresses_or_writes_where_it_need_not() -> None:
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_images_of_others_are_pinned() -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


def test_every_named_volume_is_declared() -> None:
    named = {v.split(":")[0] for s in SERVICES.values() for v in s["volumes"] if not v.startswith(".")}
    assert named == COMPOSE["volumes"].keys()
