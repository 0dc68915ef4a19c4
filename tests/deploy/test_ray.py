"""The cluster with Ray: rendered by kubectl, checked against the schemas of Kubernetes and Ray, and the settings."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.cli import load_settings
from tests.deploy.files import ROOT
from tests.deploy.test_kubernetes import NEWEST_KUBERNETES, OLDEST_KUBERNETES, Object, everyone_selected, one, rendered

pytestmark = pytest.mark.long


def cluster() -> Object:
    config: Object = one("ray", "RayService")["spec"]["rayClusterConfig"]
    return config


def templates() -> dict[str, Object]:
    """The pods that KubeRay makes, by their group."""
    workers = {group["groupName"]: group["template"] for group in cluster()["workerGroupSpecs"]}
    return {"head": cluster()["headGroupSpec"]["template"], **workers}


def serve_config() -> Any:
    return yaml.safe_load(one("ray", "RayService")["spec"]["serveConfigV2"])


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
def test_kubernetes_accepts_every_object_and_every_pod(version: str) -> None:
    kinds = [item["kind"] for item in rendered("ray")]
    assert "Deployment" not in kinds
    assert "Service" not in kinds  # KubeRay makes one
    for item in rendered("ray"):
        if item["kind"] != "RayService":
            kubernetes_validate.validate(item, version, strict=True)
    for name, template in templates().items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": name}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, version, strict=True)


def test_what_a_pod_refers_to_is_there() -> None:
    for template in templates().values():
        spec = template["spec"]
        (container,), volumes = spec["containers"], {volume["name"]: volume for volume in spec["volumes"]}
        assert container["image"] == spec["initContainers"][0]["image"] == "ropewalk:cuda"
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert one("ray", "PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"])
        assert one("ray", "ConfigMap", volumes["policy"]["configMap"]["name"])
        assert one("ray", "ConfigMap", container["envFrom"][0]["configMapRef"]["name"])
        assert volumes["keys"]["secret"]["secretName"] == "ropewalk-api-keys"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_settings_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    (application,) = serve_config()["applications"]
    (reference,) = templates()["head"]["spec"]["containers"][0]["envFrom"]
    for name, value in one("ray", "ConfigMap", reference["configMapRef"]["name"])["data"].items():
        monkeypatch.setenv(name, value)
    settings = load_settings(application["args"])
    (workers,) = cluster()["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert settings.device == "cuda"
    assert limits["nvidia.com/gpu"] == "1"
    assert str(settings.ray_cpus) == limits["cpu"]
    assert (settings.ray_min, settings.ray) == (workers["minReplicas"], workers["maxReplicas"])
    assert settings.shutdown_seconds < workers["template"]["spec"]["terminationGracePeriodSeconds"]
    module, _, name = application["import_path"].partition(":")
    assert re.search(rf"^def {name}\(", (ROOT / f"{module.replace('.', '/')}.py").read_text(), re.M)


def test_ray_accepts_its_config() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(serve_config())


def test_the_versions_of_ray_are_one() -> None:
    pinned = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert [cluster()["rayVersion"]] == pinned


def test_the_cluster_s_pods_reach_each_other_and_callers_their_port() -> None:
    labels = [template["metadata"]["labels"] for template in templates().values()]
    own = one("ray", "NetworkPolicy", "ropewalk-ray")["spec"]
    assert all(everyone_selected(own["podSelector"], pod) for pod in labels)
    assert "ports" not in own["ingress"][0]
    assert all(everyone_selected(own["ingress"][0]["from"][0]["podSelector"], pod) for pod in labels)
    (callers,) = one("ray", "NetworkPolicy")["spec"]["ingress"]
    ports = {port["containerPort"] for t in templates().values() for port in t["spec"]["containers"][0]["ports"]}
    assert [port["port"] for port in callers["ports"]] == [serve_config()["http_options"]["port"]]
    assert serve_config()["http_options"]["port"] in ports


def test_the_probes_need_nothing_that_the_image_lacks() -> None:
    for template in templates().values():
        (container,) = template["spec"]["containers"]
        for kind in ("readinessProbe", "livenessProbe"):
            program, flag, code = container[kind]["exec"]["command"]
            assert (program, flag) == ("python", "-c")
            compile(code, kind, "exec")
