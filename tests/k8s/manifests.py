"""What `kubectl apply -k` would send: the objects of a kustomization, built without a cluster."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu", "gpu", "gpu-pool", "gpu-vllm", "high-availability")
KUSTOMIZATIONS = (*(f"overlays/{name}" for name in OVERLAYS), "development", "load", "models")


needs_kustomize = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds the kustomizations")


def build(kustomization: Path) -> list[Manifest]:
    """Return the objects of a kustomization, in kustomize's order."""
    command = ["kubectl", "kustomize", str(kustomization)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [manifest for manifest in yaml.safe_load_all(built.stdout) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def cluster_of(manifest: Manifest) -> Manifest:
    """Return the RayCluster specification of a RayService or a RayCluster."""
    spec: Manifest = manifest["spec"]
    return spec["rayClusterConfig"] if manifest["kind"] == "RayService" else spec


def groups_of(cluster: Manifest) -> dict[str, Manifest]:
    """Return the head group and the worker groups by name."""
    workers = {group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])}
    return {"head": cluster["headGroupSpec"], **workers}


def ray_container(group: Manifest) -> Manifest:
    """Return the container in which Ray runs: KubeRay takes the first."""
    container: Manifest = group["template"]["spec"]["containers"][0]
    return container
