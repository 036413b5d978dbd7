"""Kubernetes, KubeRay, Serve and the application accept every kustomization of `k8s/`; mistakes in them are found."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s import schemas
from tests.k8s.manifests import K8S, KUSTOMIZATIONS, OVERLAYS, build, needs_kustomize, of_kind
from tests.k8s.problems import problems
from tests.k8s.serving_rules import app_config

pytestmark = [
    needs_kustomize,
    pytest.mark.skipif(not schemas.CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {schemas.CRDS}"),
]
README = (K8S / "README.md").read_text()


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_nothing_is_wrong_with_a_kustomization(kustomization: str) -> None:
    assert problems(build(K8S / kustomization)) == []


COMBINATIONS = [
    ("cpu", ["monitoring", "volcano"]),
    ("gpu", ["models-from-image", "kueue"]),
    ("gpu-pool", ["incremental-upgrade", "models-from-image", "monitoring"]),
    ("high-availability", ["incremental-upgrade", "monitoring", "kueue"]),
]
"""Overlays with the components that somebody might add."""


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_components_can_be_combined(overlay: str, components: list[str], tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "ml",
        "resources": [f"../k8s/overlays/{overlay}"],
        "components": [f"../k8s/components/{component}" for component in components],
    }
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    manifests = build(tmp_path / "ours")
    assert problems(manifests) == []
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {"ml"}
    if "models-from-image" in components:
        assert [claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")] == [
            "paceline-cache"
        ]


def test_every_component_is_combined() -> None:
    components = {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}
    assert {component for _, combined in COMBINATIONS for component in combined} | {"high-availability"} == components


MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "base/rayservice.yaml": [
        ("minReplicas: 1", "minReplica: 1", "'minReplica' was unexpected"),
        ("  upgradeStrategy:\n    type", "  upgradeStrategie:\n    type", "'upgradeStrategie' was unexpected"),
        ('num-cpus: "0"', "num-cpus: 0", "0 is not of type 'string'"),
        ("type: NewCluster", "type: Rolling", "upgradeStrategy.type is Rolling"),
        ("min_replicas: 1", "min_replica: 1", "unknown argument autoscaling.min_replica"),
        ("route_prefix: /", "route_prefx: /", "unknown field applications.0.route_prefx"),
        ("    applications:", "    http_options: {prt: 80}\n    applications:", "unknown field http_options.prt"),
        ("          api_key_file: /etc/paceline/api-keys/keys\n", "", "everybody may use the service"),
        ('        num-cpus: "0"', '        num-cpus: "4"', "the head has CPUs"),
        ("rayVersion: 2.60.0", "rayVersion: 2.59.0", "rayVersion is 2.59.0"),
        ("mode: token", "mode: disabled", "anybody who reaches the dashboard"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "its root is writable"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "it may run as root"),
        ("GracePeriodSeconds: 690", "GracePeriodSeconds: 300", "it has 300 s to end"),
        ("DelaySeconds: 660", "DelaySeconds: 60", "deleted before its streams"),
        ("{path: /ready, port: serve}", "{path: /api/healthz, port: 52365}", "ready without a proxy"),
        ("{name: serve, containerPort: 8000} #", "{name: serve, containerPort: 80} #", "'serve': 80"),
        ("{name: tmp, mountPath: /tmp}", "{name: temp, mountPath: /tmp}", "the volumes ['temp'], which do not exist"),
        ("secretName: paceline-api-keys", "secretName: paceline-api-key", "there is no Secret paceline-api-key"),
        ("max_replicas: 2", "max_replicas: 3", "room for 2 of 3 replicas"),
        ("        maxReplicas: 2", "        maxReplicas: 3", "one pod less than 3"),
        ('num-cpus: "1"', 'num-cpus: "2"', "one pod less than 2"),
    ],
    "base/networkpolicy.yaml": [
        (
            "spec:\n  podSelector:\n    matchLabels: {app: paceline}",
            "spec:\n  podSelector:\n    matchLabels: {app: pacelin}",
            "NetworkPolicy paceline selects no pod",
        ),
        ("port: 8265", "port: 8266", "the dashboard's port is closed"),
    ],
    "overlays/gpu-pool/kustomization.yaml": [
        ("images:\n  - {name: paceline, newTag: 0.1.0-cuda}\n", "", "one image with a tag")
    ],
    "overlays/gpu-pool/serve.yaml": [
        ("tensor_parallel_size: 4", "tensor_parallel_size: 5", "room for 0 of 2 replicas"),
        ("{replicas: 1}", "{replicas: 2}", "room for 1 of 2 draft workers"),
        ("          draft_pool: {replicas: 1} #", "          #", "room for 1 of 2 replicas"),
        ("draft: {pool: draft}", "draft: {pool: drafts}", "room for 0 of 1 draft workers"),
        ("{pool: target}", "{pool: targets}", "label pool=targets"),
    ],
    "overlays/gpu/serve.yaml": [("device: cuda", "device: auto", "how many pods have joined")],
    "overlays/gpu/workers.yaml": [
        (
            'limits: {cpu: "16", memory: 200Gi, nvidia.com/gpu: "5"}',
            'limits: {cpu: "16", memory: 200Gi, nvidia.com/gpu: "6"}',
            "request and limit of nvidia.com/gpu differ",
        )
    ],
    "models/claim/claim.yaml": [
        ("name: paceline-models", "name: models", "there is no PersistentVolumeClaim paceline-models")
    ],
    "overlays/gpu/cache.yaml": [
        ("name: paceline-cache", "name: cache", "there is no PersistentVolumeClaim paceline-cache")
    ],
    "models/job.yaml": [
        ("claimName: paceline-models", "claimName: models", "there is no PersistentVolumeClaim models")
    ],
    "overlays/gpu-pool/workers.yaml": [
        ('object-store-memory: "1073741824"', 'num-gpus: "4"\n        resources: {GPU: "4"}', "both set ['num-gpus']"),
        ('object-store-memory: "1073741824"', 'labels: "pool=target"', "labels belong into the group's labels"),
    ],
    "components/high-availability/poddisruptionbudget.yaml": [
        ("minAvailable: 1", "maxUnavailable: 1", "a whole minAvailable only"),
        ("minAvailable: 1", "minAvailable: 2", "lets no pod go"),
        ("ray.io/group: target", "ray.io/group: worker", "PodDisruptionBudget paceline-target selects no pod"),
    ],
    "components/high-availability/redis.yaml": [
        ("targetPort: redis", "targetPort: rediss", "the port rediss, which no pod has")
    ],
    "components/high-availability/kustomization.yaml": [
        ("redisPassword:", "redisPasswort:", "'redisPasswort' was unexpected")
    ],
}
"""By file: what stands there, what a mistake makes of it, and words of the sentence that reports it."""
KUSTOMIZATION_OF = {
    "base": "overlays/cpu",
    "components/high-availability": "overlays/high-availability",
    "models/claim": "overlays/gpu",
}
"""What is built to find a mistake, by the folder of the file that has it; other folders are built themselves."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "right", "wrong", "report"),
    [pytest.param(file, *mutation, id=mutation[2]) for file, made in MUTATIONS.items() for mutation in made],
)
def test_a_mistake_is_found(file: str, right: str, wrong: str, report: str, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    text = (tmp_path / "k8s" / file).read_text()
    assert right in text
    (tmp_path / "k8s" / file).write_text(text.replace(right, wrong))
    folder = str(Path(file).parent)
    reported = problems(build(tmp_path / "k8s" / KUSTOMIZATION_OF.get(folder, folder)))
    assert [problem for problem in reported if report in problem], reported


def test_the_job_fills_what_the_overlays_read(tmp_path: Path) -> None:
    (job,) = of_kind(build(K8S / "models"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    fake = tmp_path / "hf"
    fake.write_text('#!/bin/sh\nshift; echo "$1 $4 $5"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [*container["command"], *container["args"]]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    target, draft = container["args"]
    (service,) = of_kind(build(K8S / "overlays" / "gpu"), "RayService")
    pair = app_config(service).pair
    folders = {target: pair.target_model, draft: pair.draft_model}
    assert ran.stdout.splitlines() == [f"{name} --local-dir {folder}" for name, folder in folders.items()]


def first_cells(header: str) -> set[str]:
    """The names in the first column of the table with this header."""
    table = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    rows = table.splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def test_the_tables_name_every_overlay_and_component() -> None:
    assert first_cells("overlay") == set(OVERLAYS)
    assert first_cells("component") == {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}


def test_the_readme_counts_the_mistakes_that_are_made() -> None:
    assert f"{sum(map(len, MUTATIONS.values()))} mistakes are made on purpose" in README


def test_the_first_commands_use_what_exists() -> None:
    (block,) = re.findall(r"```bash\n(kind create.*?)```", README, re.DOTALL)
    for path in re.findall(r"k8s/[\w/-]+", block):
        assert (K8S.parent / path).exists()
    (body,) = re.findall(r"-d '(.*)'", block)
    assert json.loads(body)["stream"] is True
