"""What an operator applies is what Kubernetes, KubeRay, Serve and Ray's launcher take, and its parts fit together."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pydantic
import pytest
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.job_submission import JobStatus
from ray.serve.schema import ServeDeploySchema

from cluster.cli import app
from cluster.run_file import option_names, read_run_file
from tests.cluster.kuberay_schema import RAY_KINDS, PodMonitor, RayCronJob, RayJob, RayService

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "cluster" / "kuberay"
KUBERNETES = "1.33"
FILES = sorted(KUBERAY.glob("*.yaml"))
RESOURCES = [(file.name, document) for file in FILES for document in yaml.safe_load_all(file.read_text())]
SERVES = {"service-colocated": "qwen3-8b", "service-disaggregated": "qwen3-8b-disaggregated"}


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in RESOURCES if document["kind"] == kind]


def ray_resources() -> list[Any]:
    return [RAY_KINDS[d["kind"]].model_validate(d) for _, d in RESOURCES if d["kind"] in RAY_KINDS]


def as_pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a resource."""
    if document["kind"] in RAY_KINDS:
        return RAY_KINDS[document["kind"]].model_validate(document).cluster().templates()
    return [document["spec"]["jobTemplate"]["spec"]["template"]] if document["kind"] == "CronJob" else []


def check(document: dict[str, Any]) -> None:
    """Raise if Kubernetes or KubeRay would not take the resource."""
    if document["kind"] in RAY_KINDS:
        RAY_KINDS[document["kind"]].model_validate(document)
        for template in as_pods(document):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    elif document["kind"] == "PodMonitor":
        PodMonitor.model_validate(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(("file", "document"), RESOURCES, ids=[f"{file}:{d['kind']}" for file, d in RESOURCES])
def test_a_manifest_is_what_kubernetes_takes(file, document):
    check(document)
    text = (KUBERAY / file).read_text()
    assert text.startswith(("# kubectl apply -f cluster/kuberay/" + file, "# Copy it")), "its first line applies it"


@pytest.mark.parametrize("change", [
    lambda d: d["spec"].update(rayVersoin="2.60.0"),
    lambda d: d["spec"]["workerGroupSpecs"][0].update(maxReplicas=-1),
    lambda d: d["spec"]["workerGroupSpecs"][0].update(replicas=9),
    lambda d: d["spec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 4}),
    lambda d: d["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(imag="x"),
    lambda d: d["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"][0].update(containerPort="x"),
    lambda d: d["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0].pop("name"),
    lambda d: d["spec"].pop("autoscalerOptions") and d["spec"].pop("enableInTreeAutoscaling"),
])  # fmt: skip
def test_a_mistake_in_a_manifest_is_found(change):
    document = copy.deepcopy(of_kind("RayCluster")[0])
    change(document)
    with pytest.raises((pydantic.ValidationError, kubernetes_validate.ValidationError)):
        check(document)


def test_every_name_that_is_referred_to_is_there():
    secrets = {d["metadata"]["name"]: set(d["stringData"]) for d in of_kind("Secret")}
    claims = {d["metadata"]["name"] for d in of_kind("PersistentVolumeClaim")}
    pods = [template["spec"] for _, document in RESOURCES for template in as_pods(document)]
    assert len(pods) == 2 * 7 + 1
    for pod in pods:
        volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod.get("volumes", [])}
        assert set(volumes.values()) <= claims
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == set(volumes)
        assert all(source["secretRef"]["name"] in secrets for source in container.get("envFrom", []))
        for variable in container["env"]:
            if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert reference["key"] in secrets[reference["name"]]
    for resource in ray_resources():
        assert "auth_token" in secrets[resource.cluster().authOptions.secretName]
    assert not any("change-me" not in value for d in of_kind("Secret") for key, value in d["stringData"].items()
                   if not key.startswith(("AWS_REGION", "AWS_ENDPOINT")))  # fmt: skip


def test_pods_run_one_image_of_one_ray_version_and_say_what_they_take():
    base = re.search(r"^FROM rayproject/ray:([0-9.]+)-", (KUBERAY / "Dockerfile").read_text(), re.MULTILINE)
    images = set()
    for resource in ray_resources():
        assert resource.cluster().rayVersion == base[1]
    for _, document in RESOURCES:
        for template in as_pods(document):
            (container,) = template["spec"]["containers"]
            images.add(container["image"])
            takes = container["resources"]
            assert {"cpu", "memory"} <= set(takes["limits"])
            assert takes["limits"].get("nvidia.com/gpu") == takes["requests"].get("nvidia.com/gpu")
    assert len(images) == 1
    assert images.pop().split("/")[-1].split(":")[0] == "draftloop"


@pytest.mark.parametrize(("file", "serve"), SERVES.items())
def test_a_service_deploys_what_serve_deploy_does(file, serve):
    service = RayService.model_validate(yaml.safe_load((KUBERAY / f"{file}.yaml").read_text()))
    config = yaml.safe_load(service.spec.serveConfigV2)
    assert config == yaml.safe_load((ROOT / "cluster" / "serve" / f"{serve}.yaml").read_text())
    schema = ServeDeploySchema.model_validate(config)
    args = schema.applications[0].args
    (group,) = service.cluster().workerGroupSpecs
    (container,) = group.template["spec"]["containers"]
    assert {"name": "serve", "containerPort": schema.http_options.port} in container["ports"]
    # a pod holds one whole replica, so that each scrape target is one; and there is a pod for every replica
    apart = args.get("disaggregated")
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == (2 if apart else 1)
    wanted = args["num_cpus"] + (apart["drafter_cpus"] if apart else 0)
    assert wanted <= int(container["resources"]["limits"]["cpu"]) < 2 * wanted + 1
    most = args["autoscale"]["max_replicas"] if "autoscale" in args else args["num_replicas"]
    assert group.maxReplicas == most
    assert service.cluster().headGroupSpec.rayStartParams["num-cpus"] == "0"
    assert service.spec.excludeHeadPodFromServeSvc


def test_the_monitor_finds_the_pods_that_serve():
    (monitor,) = (PodMonitor.model_validate(document) for document in of_kind("PodMonitor"))
    (endpoint,) = monitor.spec.podMetricsEndpoints
    assert endpoint.path == "/metrics"
    assert {r.targetLabel: r.replacement for r in endpoint.relabelings} == {"job": "draftloop"}
    own = {k: v for k, v in monitor.spec.selector.matchLabels.items() if not k.startswith("ray.io/")}
    for document in of_kind("RayService"):
        head, *workers = as_pods(document)
        assert own.items().isdisjoint(head.get("metadata", {}).get("labels", {}).items())
        for worker in workers:
            assert own.items() <= worker["metadata"]["labels"].items()
            assert endpoint.port in [port["name"] for port in worker["spec"]["containers"][0]["ports"]]


def commands() -> list[list[str]]:
    """What jobs and schedules run."""
    found = [shlex.split(d["spec"]["entrypoint"]) for d in of_kind("RayJob")]
    found += [shlex.split(d["spec"]["jobTemplate"]["entrypoint"]) for d in of_kind("RayCronJob")]
    return found


def test_jobs_run_commands_that_there_are():
    assert len(commands()) == len(of_kind("RayJob")) + len(of_kind("RayCronJob")) == 4
    for words in commands():
        assert words[0] == "draftloop"
        assert words[2] == "--run"
        file = ROOT / Path(words[3]).relative_to("/home/ray/draftloop")
        command = typer.main.get_command(app).commands[words[1]]
        options = read_run_file(file, option_names(typer.Context(command)))
        assert (options["target"], options["gpu"]) == ("Qwen/Qwen3-8B", "true")
        assert words[1] == "train" or options["dtype"] == "bfloat16", "8 B in float32 do not fit"


def test_both_schedules_and_the_job_redistill_the_same():
    (cron,) = of_kind("CronJob")
    (ray_cron,) = (RayCronJob.model_validate(document) for document in of_kind("RayCronJob"))
    assert cron["spec"]["schedule"] == ray_cron.spec.schedule
    assert cron["spec"]["timeZone"] == "Etc/UTC"
    assert cron["spec"]["concurrencyPolicy"] == "Forbid"
    job = RayJob.model_validate(yaml.safe_load((KUBERAY / "job-redistill.yaml").read_text()))
    assert job.spec == ray_cron.spec.jobTemplate
    assert shlex.split(job.spec.entrypoint) == submitted(cron)[: len(shlex.split(job.spec.entrypoint))]


def submitted(cron: dict[str, Any]) -> list[str]:
    """The command after `--` in the CronJob's script."""
    script = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    return shlex.split(script.split(" -- ")[1].replace("\\\n", " "))


RAY = """
from enum import Enum
from os import environ
from pathlib import Path


class JobSubmissionClient:
    def get_job_status(self, submission_id):
        with open(environ["LOG"], "a") as log:
            print("api state", submission_id, file=log)
        state = Path(environ["STATE"]).read_text().strip()
        if not state:
            raise RuntimeError(f"Request failed with status code 404: Job {submission_id} does not exist")
        return Enum("JobStatus", [(state, state)])(state)
"""
FAKES = """
ray() {
  echo "ray $*" >> "$LOG"
  case "$2" in
    status) [ "$(cat "$STATE")" = SUCCEEDED ] && echo "Job '$3' succeeded" || echo "Job '$3' failed" ;;
    logs|submit) echo "$THEN" > "$STATE" ;;
  esac
}
date() { if [ "$1" = +%s ]; then echo "$NOW"; else command date "$@"; fi; }
"""
WINDOW = "redistill-20261130T060000Z-20261130T120000Z"
RUN_FILE = "/home/ray/draftloop/cluster/runs/redistill-qwen3-8b.yaml"


def run_script(tmp_path: Path, now: int, state: str, then: str = "SUCCEEDED") -> tuple[int, list[str]]:
    """(exit code, calls of Ray) of the script at a time, the job of its window in that state, and in another later."""
    (cron,) = of_kind("CronJob")
    container = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    log, states = tmp_path / "log", tmp_path / "state"
    states.write_text(state)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "job_submission.py").write_text(RAY)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "LOG": str(log), "STATE": str(states),
        "NOW": str(now), "THEN": then,
    }  # fmt: skip
    command = [*container["command"], FAKES + container["args"][0]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, log.read_text().splitlines()


def test_the_window_is_the_submission_id(tmp_path):
    code, calls = run_script(tmp_path, 1796040600, "")  # 2026-11-30 12:10
    assert (code, calls[0]) == (0, f"api state {WINDOW}")
    assert calls[1] == (
        f"ray job submit --submission-id {WINDOW} -- draftloop redistill --run {RUN_FILE} --until 2026-11-30T12:00:00Z"
    )


@pytest.mark.parametrize(("state", "ends", "code", "then"), [
    ("SUCCEEDED", "", 0, []),
    ("RUNNING", "SUCCEEDED", 0, ["logs", "state"]),
    ("PENDING", "FAILED", 1, ["logs", "state"]),
    ("FAILED", "SUCCEEDED", 0, ["delete", "submit", "state"]),
    ("STOPPED", "STOPPED", 1, ["delete", "submit", "state"]),  # Ray's own exit code of such a submission is 0
])  # fmt: skip
def test_a_window_that_was_submitted_before_is_waited_for_or_goes_on(tmp_path, state, ends, code, then):
    assert {state, ends} - {""} <= {status.value for status in JobStatus}
    ended, calls = run_script(tmp_path, 1796040600 + 3600, state, ends)
    assert (ended, [call.split()[1 if call.startswith("api") else 2] for call in calls[1:]]) == (code, then)
    assert all(WINDOW in call for call in calls)


def test_the_cron_job_submits_to_the_standing_cluster():
    (cron,) = of_kind("CronJob")
    (cluster,) = of_kind("RayCluster")
    container = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    port = next(port["containerPort"] for port in head["ports"] if port["name"] == "dashboard")
    assert environment["RAY_ADDRESS"] == f"http://{cluster['metadata']['name']}-head-svc:{port}"
    assert environment["RAY_AUTH_MODE"] == "token"


def test_the_launcher_takes_the_cluster_file():
    config = yaml.safe_load((ROOT / "cluster" / "ray" / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="worker_setup"):
        validate_config(prepare_config(config | {"worker_setup": []}))
    assert all("RAY_AUTH_MODE=token" in config[f"{kind}_start_ray_commands"][1] for kind in ("head", "worker"))


def test_filled_in_secrets_get_neither_into_git_nor_into_the_image():
    """The file that the operations page has one make."""
    page = (ROOT / "cluster" / "OPERATIONS.md").read_text()
    (copy_to,) = re.findall(r"^cp cluster/kuberay/secrets.example.yaml (\S+)", page, re.MULTILINE)
    assert copy_to in (ROOT / ".gitignore").read_text().splitlines()
    assert f"**/{copy_to}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert "COPY --chown=ray:users . ." in (KUBERAY / "Dockerfile").read_text()
