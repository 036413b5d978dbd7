"""Mistakes in the manifests are found: each of these changes of one line is reported."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.k8s import schemas
from tests.k8s.manifests import K8S, build, has_kustomize
from tests.k8s.problems import problems

pytestmark = [
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
    pytest.mark.skipif(not schemas.CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {schemas.CRDS}"),
]


class Mutation(NamedTuple):
    """A change in a file of `k8s/`, and words of the sentence that reports it."""

    file: str
    right: str
    wrong: str
    report: str


BASE, GPU, MIXED = "base/rayservice.yaml", "overlays/gpu", "overlays/gpu-heterogeneous"
AVAILABLE = "components/high-availability"

MUTATIONS = {
    "a field that does not exist": Mutation(BASE, "minReplicas: 1", "minReplica: 1", "'minReplica' was unexpected"),
    "a field in the wrong place": Mutation(
        BASE, "  upgradeStrategy:\n    type", "  upgradeStrategie:\n    type", "'upgradeStrategie' was unexpected"
    ),
    "a number where Kubernetes wants a text": Mutation(
        BASE, 'num-cpus: "0"', "num-cpus: 0", "0 is not of type 'string'"
    ),
    "a kind of upgrade that does not exist": Mutation(
        BASE, "type: NewCluster", "type: Rolling", "upgradeStrategy.type is Rolling"
    ),
    "an argument that does not exist": Mutation(
        BASE, "min_replicas: 1", "min_replica: 1", "unknown argument autoscaling.min_replica"
    ),
    "a field that Serve does not know": Mutation(
        BASE, "route_prefix: /", "route_prefx: /", "unknown field applications.0.route_prefx"
    ),
    "a setting of the HTTP server that Serve ignores": Mutation(
        BASE, "    applications:", "    http_options: {prt: 80}\n    applications:", "unknown field http_options.prt"
    ),
    "a service without keys": Mutation(
        BASE, "          api_key_file: /etc/paceline/api-keys/keys\n", "", "everybody may use the service"
    ),
    "a head that computes": Mutation(BASE, '        num-cpus: "0"', '        num-cpus: "4"', "the head has CPUs"),
    "another version of Ray": Mutation(BASE, "rayVersion: 2.60.0", "rayVersion: 2.59.0", "rayVersion is 2.59.0"),
    "a dashboard without a token": Mutation(BASE, "mode: token", "mode: disabled", "anybody who reaches the dashboard"),
    "a writable root": Mutation(
        BASE, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "its root is writable"
    ),
    "root": Mutation(BASE, "runAsNonRoot: true", "runAsNonRoot: false", "it may run as root"),
    "no time to drain": Mutation(BASE, "GracePeriodSeconds: 690", "GracePeriodSeconds: 300", "it has 300 s to end"),
    "an old cluster that goes too early": Mutation(
        BASE, "DelaySeconds: 660", "DelaySeconds: 60", "deleted before its streams"
    ),
    "a probe that needs no proxy": Mutation(
        BASE, "{path: /ready, port: serve}", "{path: /api/healthz, port: 52365}", "ready without a proxy"
    ),
    "a port that nobody listens on": Mutation(
        BASE, "{name: serve, containerPort: 8000} #", "{name: serve, containerPort: 80} #", "'serve': 80"
    ),
    "a volume that does not exist": Mutation(
        BASE,
        "{name: tmp, mountPath: /tmp}",
        "{name: temp, mountPath: /tmp}",
        "the volumes ['temp'], which do not exist",
    ),
    "a secret that nobody makes": Mutation(
        BASE, "secretName: paceline-api-keys", "secretName: paceline-api-key", "there is no Secret paceline-api-key"
    ),
    "more replicas than pods": Mutation(BASE, "max_replicas: 2", "max_replicas: 3", "room for 2 of 3 replicas"),
    "more pods than replicas": Mutation(
        BASE, "        maxReplicas: 2", "        maxReplicas: 3", "one pod less than 3"
    ),
    "two replicas in one pod": Mutation(BASE, 'num-cpus: "1"', 'num-cpus: "2"', "one pod less than 2"),
    "a policy that selects nothing": Mutation(
        "base/networkpolicy.yaml",
        "spec:\n  podSelector:\n    matchLabels: {app: paceline}",
        "spec:\n  podSelector:\n    matchLabels: {app: pacelin}",
        "NetworkPolicy paceline selects no pod",
    ),
    "a policy that keeps the operator out": Mutation(
        "base/networkpolicy.yaml", "port: 8265", "port: 8266", "the dashboard's port is closed"
    ),
    "a tag for some pods only": Mutation(
        f"{MIXED}/kustomization.yaml", "images:\n  - {name: paceline, newTag: 0.1.0-cuda}\n", "", "one image with a tag"
    ),
    "a bundle that fits nowhere": Mutation(
        f"{MIXED}/serve.yaml", "tensor_parallel_size: 4", "tensor_parallel_size: 5", "room for 0 of 1 replicas"
    ),
    "a device that depends on who has joined": Mutation(
        f"{GPU}/serve.yaml", "device: cuda", "device: auto", "how many pods have joined"
    ),
    "GPUs requested but not limited": Mutation(
        f"{GPU}/workers.yaml",
        'limits: {cpu: "16", memory: 200Gi, nvidia.com/gpu: "5"}',
        'limits: {cpu: "16", memory: 200Gi, nvidia.com/gpu: "6"}',
        "request and limit of nvidia.com/gpu differ",
    ),
    "models that no volume has": Mutation(
        "models/claim/claim.yaml",
        "name: paceline-models",
        "name: models",
        "there is no PersistentVolumeClaim paceline-models",
    ),
    "models for another volume": Mutation(
        "models/job.yaml",
        "claimName: paceline-models",
        "claimName: models",
        "there is no PersistentVolumeClaim models",
    ),
    "a GPU that no node has": Mutation(
        f"{MIXED}/serve.yaml", "draft_accelerator_type: L4", "draft_accelerator_type: L40S", "accelerator_type:L40S"
    ),
    "a label that no node has": Mutation(
        f"{MIXED}/serve.yaml", "{pool: target}", "{pool: targets}", "label pool=targets"
    ),
    "resources that are set twice": Mutation(
        f"{MIXED}/workers.yaml", 'object-store-memory: "1073741824"', 'num-gpus: "4"', "both set ['num-gpus']"
    ),
    "a label in the wrong place": Mutation(
        f"{MIXED}/workers.yaml",
        'object-store-memory: "1073741824"',
        'labels: "pool=target"',
        "labels belong into the group's labels",
    ),
    "a budget that Kubernetes cannot count": Mutation(
        f"{AVAILABLE}/poddisruptionbudget.yaml", "minAvailable: 1", "maxUnavailable: 1", "a whole minAvailable only"
    ),
    "a budget that lets nobody go": Mutation(
        f"{AVAILABLE}/poddisruptionbudget.yaml", "minAvailable: 1", "minAvailable: 2", "lets no pod go"
    ),
    "a budget for pods that do not exist": Mutation(
        f"{AVAILABLE}/poddisruptionbudget.yaml",
        "ray.io/group: target",
        "ray.io/group: worker",
        "PodDisruptionBudget paceline-target selects no pod",
    ),
    "a Service without its port": Mutation(
        f"{AVAILABLE}/redis.yaml", "targetPort: redis", "targetPort: rediss", "the port rediss, which no pod has"
    ),
    "a Secret's name in the wrong field": Mutation(
        f"{AVAILABLE}/kustomization.yaml", "redisPassword:", "redisPasswort:", "'redisPasswort' was unexpected"
    ),
}
KUSTOMIZATION_OF = {
    "base": "overlays/cpu",
    GPU: GPU,
    MIXED: MIXED,
    AVAILABLE: "overlays/high-availability",
    "models": "models",
    "models/claim": GPU,
}
"""What is built to find a mistake, by the folder of the file that has it."""


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[mistake]
    copy = tmp_path / "k8s"
    shutil.copytree(K8S, copy)
    file = copy / mutation.file
    text = file.read_text()
    assert mutation.right in text
    file.write_text(text.replace(mutation.right, mutation.wrong))
    found = problems(build(copy / KUSTOMIZATION_OF[str(Path(mutation.file).parent)]))
    assert [problem for problem in found if mutation.report in problem], found
