"""The Kubernetes manifests agree with the settings, the image and the application.

Their validity under Kubernetes' own schemas was checked by hand with kustomize and
kubernetes-validate; this file checks what those tools cannot know.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.cli.flags import parse_settings
from server.metrics import Metrics
from tests.servers import Server
from tests.test_house import IdleEngine

ROOT = Path(__file__).parents[1]
MANIFESTS = ROOT / "configs" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


@pytest.fixture
def pods() -> dict[str, Any]:
    (stateful_set,) = documents("base/statefulset.yaml")
    return stateful_set["spec"]["template"]["spec"]


@pytest.fixture
def container(pods: dict[str, Any]) -> dict[str, Any]:
    (only,) = pods["containers"]
    return only


@pytest.mark.parametrize(
    "file", sorted(MANIFESTS.glob("*/kustomization.yaml")), ids=lambda path: path.parent.name
)
def test_a_kustomization_names_what_exists(file: Path) -> None:
    told = yaml.safe_load(file.read_text())
    named = list(told.get("resources", ()))
    named += [patch["path"] for patch in told.get("patches", ()) if "path" in patch]
    named += [name for map in told.get("configMapGenerator", ()) for name in map["files"]]
    assert named
    assert all((file.parent / name).exists() for name in named)
    used = {path.name for path in file.parent.iterdir()} - {"kustomization.yaml"}
    assert used <= set(named), "a file that nothing names"


@pytest.mark.parametrize(
    "file", sorted(MANIFESTS.glob("*/settings.yaml")), ids=lambda path: path.parent.name
)
def test_settings_are_settings_and_leave_requests_the_time_to_finish(
    file: Path, pods: dict[str, Any], container: dict[str, Any]
) -> None:
    settings = parse_settings([str(file)])
    (_, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
    needed_s = int(pause) + settings.shutdown_timeout_s
    assert pods["terminationGracePeriodSeconds"] > needed_s


def test_pods_are_those_of_the_image(pods: dict[str, Any], container: dict[str, Any]) -> None:
    user = re.search(r"--uid (\d+)", DOCKERFILE)
    assert user is not None
    security = pods["securityContext"]
    assert security["runAsUser"] == security["fsGroup"] == int(user[1])
    (port,) = container["ports"]
    assert f"EXPOSE {port['containerPort']}" in DOCKERFILE
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    written = {"/data", "/models", "/home/quire", "/tmp"}  # everything else is read-only
    assert written <= mounted
    assert "HF_HOME=/models QUIRE_DATA_DIR=/data" in DOCKERFILE
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    sources = {volume["name"] for volume in pods["volumes"]}
    (stateful_set,) = documents("base/statefulset.yaml")
    sources |= {claim["metadata"]["name"] for claim in stateful_set["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == sources


def test_probes_ask_for_what_is_there_with_the_key_that_it_asks_for(
    container: dict[str, Any], guarded_server: Server
) -> None:
    (code,) = container["readinessProbe"]["exec"]["command"][2:]
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", code)
    key = next(v["name"] for v in container["env"] if "secretKeyRef" in v["valueFrom"])
    assert f'os.environ["{key}"]' in code
    for probe in ("startupProbe", "livenessProbe"):
        url = guarded_server.url + container[probe]["httpGet"]["path"]
        assert httpx.get(url).status_code == 200, "needs no key"
    assert httpx.get(guarded_server.url + path).status_code == 401
    assert httpx.get(guarded_server.url + path, headers=guarded_server.headers).status_code == 200


def test_services_find_the_pods(pods: dict[str, Any]) -> None:
    (stateful_set,) = documents("base/statefulset.yaml")
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    services = {service["metadata"]["name"]: service for service in documents("base/service.yaml")}
    for service in services.values():
        assert service["spec"]["selector"].items() <= labels.items()
    headless = services[stateful_set["spec"]["serviceName"]]
    assert headless["spec"]["clusterIP"] == "None"
    settings = parse_settings([str(MANIFESTS / "two-machines" / "settings.yaml")])
    assert settings.master_addr == f"quire-0.{headless['metadata']['name']}"
    (patch,) = documents("two-machines/statefulset-patch.yaml")
    assert patch["spec"]["replicas"] == settings.nnodes
    gpus = patch["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    assert gpus["nvidia.com/gpu"] * settings.nnodes == ranks


def test_scaling_goes_by_a_metric_that_exists() -> None:
    (scaled,) = documents("monitoring/scaledobject.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    names = re.findall(r"quire:\w+", trigger["metadata"]["query"])
    # By its queue alone a set that is large enough would be made smaller.
    assert set(names) == {"quire:num_requests_running", "quire:num_requests_waiting"}
    metrics = Metrics(IdleEngine(), prefix="quire", model_name="m")
    assert set(names) <= {f.name for f in metrics.exposition(metrics.values).collect()}
    # KEDA's cooldownPeriod is that of the last replica; others go as the autoscaler is told.
    assert scaled["spec"]["minReplicaCount"] >= 1
    assert "cooldownPeriod" not in scaled["spec"]
    autoscaler = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    assert autoscaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300
    # A number of replicas here would be restored by whoever applies other settings.
    (stateful_set,) = documents("base/statefulset.yaml")
    assert "replicas" not in stateful_set["spec"]
    (monitor,) = documents("monitoring/podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
