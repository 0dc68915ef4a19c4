"""What the cluster is asked for: rendered by kubectl, checked against Kubernetes' schemas and against the server's own
limits. Knows the manifests; needs no cluster."""

import functools
import re
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.commands.serve import SECONDS_FOR_LAST_WORDS
from service.settings import Settings
from tests.deploy.files import KUBERNETES, OVERLAYS, documents, settings_of

OLDEST_KUBERNETES = "1.30"
NEWEST_KUBERNETES = "1.37"
CUSTOM_KINDS = {"ScaledObject", "PodMonitor", "PrometheusRule", "InferencePool", "HTTPRoute"}
SECONDS_TO_START = 600

long = pytest.mark.long
Object = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Object, ...]:
    """All objects of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH")
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def one(overlay: str, kind: str, name: str = "ropewalk") -> Object:
    (found,) = [o for o in rendered(overlay) if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pod(overlay: str, deployment: str = "ropewalk") -> Object:
    spec: Object = one(overlay, "Deployment", deployment)["spec"]["template"]["spec"]
    return spec


def container(overlay: str, deployment: str = "ropewalk") -> Object:
    (found,) = pod(overlay, deployment)["containers"]
    return dict(found)


def settings(overlay: str) -> dict[str, str]:
    """The environment that the server's ConfigMap gives it."""
    (reference,) = container(overlay)["envFrom"]
    data: dict[str, str] = one(overlay, "ConfigMap", reference["configMapRef"]["name"])["data"]
    return data


def allowed_seconds(probe: Object) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def everyone_selected(selector: Object, labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector["matchLabels"]
    return wanted.items() <= labels.items()


def test_the_graces_add_up() -> None:
    """Read from the files themselves, so that it holds where there is no kubectl."""
    (deployment,) = documents(KUBERNETES / "base" / "deployment.yaml")
    spec = deployment["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    sleep = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(settings_of(KUBERNETES / "base" / "settings.env")["ROPEWALK_SHUTDOWN_SECONDS"])
    assert sleep >= 5
    assert drain >= Settings.model_fields["shutdown_seconds"].default
    # The last of the three: a step under way has to end before the process can.
    assert sleep + drain + SECONDS_FOR_LAST_WORDS + 20 <= spec["terminationGracePeriodSeconds"]


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_the_graces(overlay: str) -> None:
    sleep = container(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(settings(overlay)["ROPEWALK_SHUTDOWN_SECONDS"])
    assert sleep + drain + SECONDS_FOR_LAST_WORDS < pod(overlay)["terminationGracePeriodSeconds"]


@long
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_object(overlay: str, version: str) -> None:
    kinds = set()
    for item in rendered(overlay):
        if item["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(item, version, strict=True)
        kinds.add(item["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "PersistentVolumeClaim"} < kinds


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_have_names_of_their_own(overlay: str) -> None:
    names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in rendered(overlay)]
    assert len({*names}) == len(names)


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_selects_pods_selects_the_server(overlay: str) -> None:
    deployment = one(overlay, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "ropewalk"
    assert one(overlay, "Service")["spec"]["selector"].items() <= labels.items()
    selectors = [
        deployment["spec"]["selector"],
        one(overlay, "PodDisruptionBudget")["spec"]["selector"],
        one(overlay, "NetworkPolicy")["spec"]["podSelector"],
        *(constraint["labelSelector"] for constraint in pod(overlay)["topologySpreadConstraints"]),
    ]
    assert all(everyone_selected(selector, labels) for selector in selectors)


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_refers_to_is_there(overlay: str) -> None:
    assert one(overlay, "ServiceAccount", pod(overlay)["serviceAccountName"])
    volumes = {volume["name"]: volume for volume in pod(overlay)["volumes"]}
    assert {mount["name"] for mount in container(overlay)["volumeMounts"]} == volumes.keys()
    assert one(overlay, "PersistentVolumeClaim", volumes["cache"]["persistentVolumeClaim"]["claimName"])
    assert one(overlay, "ConfigMap", volumes["policy"]["configMap"]["name"])
    assert volumes["keys"]["secret"] == {"secretName": "ropewalk-api-keys", "defaultMode": 0o440}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keys_and_policy_are_read_where_they_are_mounted(overlay: str) -> None:
    mounts = {mount["name"]: mount for mount in container(overlay)["volumeMounts"]}
    given = settings(overlay)
    assert given["ROPEWALK_API_KEY_FILE"] == mounts["keys"]["mountPath"] + "/keys"
    assert given["ROPEWALK_ROPE_POLICY"] == mounts["policy"]["mountPath"] + "/policy.yaml"
    assert all("subPath" not in mount for mount in mounts.values())


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_probes_ask_the_right_questions_for_long_enough(overlay: str) -> None:
    server = container(overlay)
    (port,) = server["ports"]
    assert port == {"name": "http", "containerPort": Settings.model_fields["port"].default}
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}
    assert all(server[f"{kind}Probe"]["httpGet"]["port"] == "http" for kind in paths)
    assert allowed_seconds(server["startupProbe"]) == SECONDS_TO_START
    assert allowed_seconds(server["livenessProbe"]) == 100
    assert allowed_seconds(server["readinessProbe"]) == 15
    assert one(overlay, "Deployment")["spec"]["progressDeadlineSeconds"] > SECONDS_TO_START


@long
@pytest.mark.parametrize(
    ("overlay", "deployment"), [*((overlay, "ropewalk") for overlay in OVERLAYS), ("gateway", "ropewalk-picker")]
)
def test_a_pod_may_do_as_little_as_possible(overlay: str, deployment: str) -> None:
    spec = pod(overlay, deployment)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["enableServiceLinks"] is False
    assert container(overlay, deployment)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if deployment == "ropewalk":
        assert spec["automountServiceAccountToken"] is False


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_server_writes_is_a_volume(overlay: str) -> None:
    mounts = {m["mountPath"]: m["name"] for m in container(overlay)["volumeMounts"] if not m.get("readOnly")}
    assert mounts == {"/var/cache/ropewalk": "cache", "/tmp": "tmp", "/dev/shm": "shm"}


@long
def test_the_device_is_the_overlay_s() -> None:
    assert container("cpu")["image"] == "ropewalk:cpu"
    assert settings("cpu")["ROPEWALK_DEVICE"] == "cpu"
    (threads,) = container("cpu")["env"]
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert container("cpu")["resources"]["limits"]["cpu"] == container("cpu")["resources"]["requests"]["cpu"]
    assert container("nvidia")["image"] == "ropewalk:cuda"
    assert settings("nvidia")["ROPEWALK_DEVICE"] == "cuda"
    assert container("nvidia")["resources"]["limits"]["nvidia.com/gpu"] == "1"


@long
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_that_may_be_several_can_share_their_cache(overlay: str) -> None:
    deployment, (mode,) = (
        one(overlay, "Deployment")["spec"],
        one(overlay, "PersistentVolumeClaim", "ropewalk-cache")["spec"]["accessModes"],
    )
    alone = deployment.get("replicas") == 1 and deployment["strategy"] == {"type": "Recreate"}
    assert mode == ("ReadWriteOnce" if alone else "ReadWriteMany")


@long
def test_the_autoscaler_has_the_replicas_to_itself() -> None:
    assert "replicas" not in one("autoscale", "Deployment")["spec"]
    spec = one("autoscale", "ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == "ropewalk"
    assert 1 <= spec["minReplicaCount"] == spec["fallback"]["replicas"] < spec["maxReplicaCount"]
    assert [trigger["name"] for trigger in spec["triggers"]] == ["waiting", "cache"]
    assert all(trigger["metricType"] == "AverageValue" for trigger in spec["triggers"])
    assert 0 < float(spec["triggers"][1]["metadata"]["threshold"]) < 1


@long
def test_prometheus_finds_the_pods_and_may_come_in() -> None:
    (endpoint,) = one("monitoring", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] == container("monitoring")["ports"][0]["name"]
    labels = one("monitoring", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert everyone_selected(one("monitoring", "PodMonitor")["spec"]["selector"], labels)
    assert labels[one("monitoring", "PodMonitor")["spec"]["jobLabel"]] == "ropewalk"  # what the rules select
    policy = one("monitoring", "NetworkPolicy", "ropewalk-monitoring")["spec"]
    assert everyone_selected(policy["podSelector"], labels)


@long
def test_a_traced_server_knows_its_collector_and_may_reach_it() -> None:
    given = settings("tracing")
    assert given["ROPEWALK_OTEL"] == "true"
    service, namespace, port = re.findall(r"^http://(\w+)\.(\w+):(\d+)$", given["OTEL_EXPORTER_OTLP_ENDPOINT"])[0]
    assert service == "collector"
    policy = one("tracing", "NetworkPolicy", "ropewalk-tracing")["spec"]
    labels = one("tracing", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert everyone_selected(policy["podSelector"], labels)
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"port": int(port)}]
    assert everyone_selected(rule["to"][0]["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    variables = {variable["name"]: variable for variable in container("tracing")["env"]}
    named = re.findall(r"\$\((\w+)\)", variables["OTEL_RESOURCE_ATTRIBUTES"]["value"])
    order = list(variables)
    assert named
    assert all(order.index(name) < order.index("OTEL_RESOURCE_ATTRIBUTES") for name in named)


@long
def test_the_gateway_reaches_the_picker_and_the_picker_the_pods() -> None:
    pool = one("gateway", "InferencePool")["spec"]
    labels = one("gateway", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert everyone_selected(pool["selector"], labels)
    assert pool["targetPorts"] == [{"number": container("gateway")["ports"][0]["containerPort"]}]
    service = one("gateway", "Service", pool["endpointPickerRef"]["name"])["spec"]
    assert pool["endpointPickerRef"]["port"]["number"] in {port["port"] for port in service["ports"]}
    picker = one("gateway", "Deployment", "ropewalk-picker")["spec"]["template"]
    assert service["selector"].items() <= picker["metadata"]["labels"].items()
    assert one("gateway", "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"
    (volume,) = [v for v in picker["spec"]["volumes"] if v["name"] == "config"]
    config = yaml.safe_load(one("gateway", "ConfigMap", volume["configMap"]["name"])["data"]["picker-config.yaml"])
    (extractor,) = [plugin for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor"]
    engines = [engine["name"] for engine in extractor["parameters"]["engineConfigs"]]
    assert labels["llm-d.ai/engine-type"] in engines
    assert (
        one("gateway", "RoleBinding", "ropewalk-picker")["subjects"][0]["name"] == picker["spec"]["serviceAccountName"]
    )


@long
def test_the_picker_is_not_taken_for_a_server() -> None:
    labels = one("gateway", "Deployment", "ropewalk-picker")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        one("gateway", "Service")["spec"]["selector"],
        one("gateway", "InferencePool")["spec"]["selector"]["matchLabels"],
    ]
    assert all(not selector.items() <= labels.items() for selector in selectors)
