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
        ("type: NewCluster", "type: Rolling", "upgradeStrategy.type is Rolling"),
        ("min_replicas: 1", "min_replica: 1", "unknown argument autoscaling.min_replica"),
        ("route_prefix: /", "route_prefx: /", "unknown field applications.0.route_prefx"),
        ("          api_key_file: /etc/paceline/api-keys/keys\n", "", "everybody may use the service"),
        ("rayVersion: 2.60.0", "rayVersion: 2.59.0", "rayVersion is 2.59.0"),
        ("mode: token", "mode: disabled", "anybody who reaches the dashboard"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "its root is writable"),
        ("GracePeriodSeconds: 690", "GracePeriodSeconds: 300", "it has 300 s to end"),
        ("DelaySeconds: 660", "DelaySeconds: 60", "deleted before its streams"),
        ("{path: /ready, port: serve}", "{path: /api/healthz, port: 52365}", "ready without a proxy"),
        ("secretName: paceline-api-keys", "secretName: paceline-api-key", "there is no Secret paceline-api-key"),
        ("max_replicas: 2", "max_replicas: 3", "room for 2 of 3 replicas"),
        ("        maxReplicas: 2", "        maxReplicas: 3", "one pod less than 3"),
    ],
    "base/networkpolicy.yaml": [("port: 8265", "port: 8266", "the dashboard's port is closed")],
    "overlays/gpu-pool/serve.yaml": [
        ("tensor_parallel_size: 4", "tensor_parallel_size: 5", "room for 0 of 2 replicas"),
        ("{replicas: 1}", "{replicas: 2}", "room for 1 of 2 draft workers"),
    ],
    "overlays/gpu/serve.yaml": [("device: cuda", "device: auto", "how many pods have joined")],
    "overlays/gpu-vllm/kustomization.yaml": [("0.1.0-cuda-vllm", "0.1.0-cuda", "there is no vLLM")],
    "components/high-availability/poddisruptionbudget.yaml": [
        ("minAvailable: 1", "minAvailable: 2", "lets no pod go"),
        ("ray.io/group: target", "ray.io/group: worker", "PodDisruptionBudget paceline-target selects no pod"),
    ],
}
"""By file: what stands there, what a mistake makes of it, and words of the sentence that reports it."""
KUSTOMIZATION_OF = {"base": "overlays/cpu", "components/high-availability": "overlays/high-availability"}
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
