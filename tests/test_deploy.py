"""Every flag, variable, port, route and metric that deploy/ and the Dockerfile name is one of Weft's."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api.http import request
from tests.api.scripted_engine import ScriptedEngine
from weft.config import load
from weft.options import Config, settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/weft.service").read_text()
KUBERNETES = DEPLOY / "kubernetes"
VARIABLES = {setting.env for setting in settings()} | {"WEFT_HOME", "WEFT_COMPILE_CACHE"}


def documents(*files: Path) -> list[dict[str, Any]]:
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


MANIFESTS = documents(*sorted((KUBERNETES / "base").glob("*.yaml")))
(STATEFUL_SET,) = (each for each in MANIFESTS if each["kind"] == "StatefulSet")
POD = STATEFUL_SET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(COMPOSE,) = documents(DEPLOY / "compose/compose.yaml")
SERVICE = COMPOSE["services"]["weft"]


def kubernetes_config() -> Config:
    return load(file=KUBERNETES / "base/weft.toml", env={})


def docker_settings() -> dict[str, str]:
    return dict(re.findall(r"\b(WEFT_\w+)=(\S+)", DOCKERFILE))


def metric_names() -> set[str]:
    exposition = request(ScriptedEngine(), "GET", "/metrics").text
    return set(re.findall(r"^([a-z:_]+)(?:{[^}]*})? ", exposition, re.MULTILINE))


@pytest.mark.parametrize(
    "file",
    [ROOT / "Dockerfile", *sorted(file for file in DEPLOY.rglob("*") if file.is_file())],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_every_variable_is_a_setting(file: Path) -> None:
    named = set(re.findall(r"\b(WEFT_[A-Z0-9_]+)(?=[=:]\s*\S)", file.read_text()))
    compose_only = {"WEFT_MODEL", "WEFT_MEMORY"} if file.parent.name == "compose" else set()
    assert named <= VARIABLES | compose_only


def test_the_files_that_should_have_variables_have_some() -> None:
    """Or the test above would find nothing to complain about."""
    assert {"WEFT_HOME", "WEFT_HOST", "WEFT_PORT", "WEFT_GRPC_PORT"} <= docker_settings().keys()
    assert SERVICE["environment"].keys() <= VARIABLES
    assert len(re.findall(r"^Environment=WEFT_", UNIT, re.MULTILINE)) == 4


def test_the_image_runs_as_nobody_in_particular_with_volumes_and_a_health_check() -> None:
    for stage in ("cpu", "cuda"):
        (body,) = re.findall(rf"^FROM runtime AS {stage}$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
        assert body.strip().endswith("USER 10001:10001")
    (volumes,) = re.findall(r"^VOLUME (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert json.loads(volumes) == ["/var/lib/weft", "/var/cache/weft"]
    assert docker_settings()["WEFT_HOME"] in json.loads(volumes)
    (probe,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert f"http://127.0.0.1:{docker_settings()['WEFT_PORT']}/health/live" in probe


def test_the_image_copies_files_that_the_context_has() -> None:
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists() and source.split("/")[0] in allowed, source


def test_the_image_s_settings_make_a_server_that_wants_a_key() -> None:
    env = {name: value for name, value in docker_settings().items() if name in {each.env for each in settings()}}
    config = load(env=env)
    assert (config.server.host, config.server.port, config.grpc.grpc_port) == ("0.0.0.0", 8000, 50051)
    assert re.search(r"^EXPOSE 8000 50051$", DOCKERFILE, re.MULTILINE)
    assert not config.server.insecure and not config.server.api_key


def test_probes_ask_for_routes_that_need_no_key() -> None:
    live = CONTAINER["livenessProbe"]["httpGet"]
    config = load({"api_key": ["sesame"]}, env={})
    assert request(ScriptedEngine(), "GET", live["path"], config).status_code == 200
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": 8000, "grpc": 50051} and live["port"] in ports
    for probe in ("startupProbe", "readinessProbe"):
        assert CONTAINER[probe]["grpc"]["port"] == ports["grpc"]


def test_a_pod_has_time_to_drain() -> None:
    (_, pause) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert POD["terminationGracePeriodSeconds"] > int(pause) + kubernetes_config().server.drain_timeout_s


def test_compose_and_systemd_wait_for_the_drain() -> None:
    drain = float(SERVICE["environment"]["WEFT_DRAIN_TIMEOUT_S"])
    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > drain
    (drain_s,) = re.findall(r"WEFT_DRAIN_TIMEOUT_S=(\d+)", UNIT)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(stop_s) > int(drain_s)
    assert "KillMode=mixed" in UNIT, "SIGTERM to all processes would end the engine before it has drained"


def test_the_servers_of_a_cluster_want_keys_and_have_folders_of_their_own() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert kubernetes_config().server.api_key_file.startswith(mounts["keys"] + "/")
    claims = {claim["metadata"]["name"] for claim in STATEFUL_SET["spec"]["volumeClaimTemplates"]}
    assert {mounts[claim] for claim in claims} == {"/var/lib/weft", "/var/cache/weft"}
    assert set(mounts) == claims | {volume["name"] for volume in POD["volumes"]}
    config_file = CONTAINER["args"][CONTAINER["args"].index("--config") + 1]
    assert config_file == f"{mounts['config']}/weft.toml"


def test_nothing_runs_as_root() -> None:
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] == 10001
    # Else the volume of compiled kernels becomes its group's at every mount, and is not used.
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert CONTAINER["securityContext"]["capabilities"] == {"drop": ["ALL"]} == {"drop": SERVICE["cap_drop"]}


def test_the_autoscaler_looks_at_a_metric_that_there_is() -> None:
    (scaler,) = (each for each in MANIFESTS if each["kind"] == "HorizontalPodAutoscaler")
    (metric,) = (each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"])
    (rules,) = documents(KUBERNETES / "prometheus-adapter.yaml")
    (rule,) = rules["rules"]["custom"]
    assert metric == rule["name"]["as"] == rule["name"]["matches"] == rule["seriesQuery"].partition("{")[0]
    assert metric in metric_names()
    assert "replicas" not in STATEFUL_SET["spec"]


def test_prometheus_scrapes_the_route_with_the_key() -> None:
    (job,) = documents(DEPLOY / "compose/prometheus.yml")[0]["scrape_configs"]
    (monitor,) = documents(KUBERNETES / "podmonitor.yaml")
    for path in (job["metrics_path"], monitor["spec"]["podMetricsEndpoints"][0]["path"]):
        assert request(ScriptedEngine(), "GET", path).status_code == 200
    (secret,) = SERVICE["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert SERVICE["environment"]["WEFT_API_KEY_FILE"] == f"/run/secrets/{secret}"
    assert secret in COMPOSE["secrets"] and secret in COMPOSE["services"]["prometheus"]["secrets"]
    assert job["static_configs"] == [{"targets": ["weft:8000"]}]


def test_grafana_finds_the_dashboard() -> None:
    (providers,) = documents(DEPLOY / "compose/grafana/provisioning/dashboards/weft.yaml")
    mounts = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    folder = {inside: outside for outside, inside in mounts.items()}[providers["providers"][0]["options"]["path"]]
    assert (DEPLOY / "compose" / folder / "weft.json").is_file()
    assert (DEPLOY / "compose/grafana/provisioning/datasources/prometheus.yaml").is_file()


def test_the_gpu_overlay_changes_the_one_container() -> None:
    (patch,) = documents(KUBERNETES / "gpu/gpu.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == CONTAINER["name"] and container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (overlay,) = documents(KUBERNETES / "gpu/kustomization.yaml")
    assert f"{overlay['images'][0]['name']}:{overlay['images'][0]['newTag']}" == "weft:cuda"


def test_the_unit_starts_a_command_that_there_is() -> None:
    (command,) = re.findall(r"^ExecStart=(.+)$", UNIT, re.MULTILINE)
    program, *words = command.split()
    assert program.endswith("/bin/weft") and words == ["serve", "--config", "/etc/weft/weft.toml"]
    assert "LoadCredential=keys:" in UNIT and "WEFT_API_KEY_FILE=%d/keys" in UNIT
    assert re.search(r"^MemoryDenyWriteExecute", UNIT, re.MULTILINE) is None, "kernels are compiled while it runs"


def test_the_version_of_python_in_the_image_is_one_that_the_project_takes() -> None:
    (oldest,) = re.findall(
        r">=3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    found = re.findall(r"^FROM python:3\.(\d+)-slim", DOCKERFILE, re.MULTILINE)
    assert found and all(int(minor) >= int(oldest) for minor in found)


(RAY_SERVICE,) = documents(KUBERNETES / "ray/rayservice.yaml")


def test_the_application_on_ray_has_settings_that_there_are() -> None:
    (application,) = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "weft.cluster:app"
    config = load(application["args"], env={})
    assert config.cluster.min_replicas <= config.cluster.replicas <= config.cluster.max_replicas
    mounts = RAY_SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    keys = next(mount["mountPath"] for mount in mounts["volumeMounts"] if mount["name"] == "keys")
    assert config.server.api_key_file.startswith(f"{keys}/")
    assert config.cluster.cluster_key_file.startswith(f"{keys}/")
    (edge,) = application["deployments"]
    names = re.findall(r'^DEPLOYMENT = "(\w+)"$', (ROOT / "weft/cli/ray_serve.py").read_text(), re.MULTILINE)
    assert [edge["name"]] == names


def test_the_nodes_on_ray_run_as_nobody_in_particular_and_have_the_gpus_that_replicas_ask_for() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    for pod in pods:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    limits = [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods]
    assert limits == [None, "1"]
    (pinned,) = re.findall(r"^ray==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == pinned
