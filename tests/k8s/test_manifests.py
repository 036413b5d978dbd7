"""Every kustomization of `k8s/` is one that Kubernetes, KubeRay, Serve and the application accept and have room for."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.k8s import schemas
from tests.k8s.manifests import K8S, KUSTOMIZATIONS, build, has_kustomize, of_kind
from tests.k8s.problems import problems

pytestmark = [
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
    pytest.mark.skipif(not schemas.CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {schemas.CRDS}"),
]


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_nothing_is_wrong_with_a_kustomization(kustomization: str) -> None:
    assert problems(build(K8S / kustomization)) == []


COMBINATIONS = [
    ("cpu", ["monitoring", "volcano"]),
    ("cpu", ["monitoring-by-ray"]),
    ("gpu", ["models-from-image", "kueue"]),
    ("gpu-heterogeneous", ["incremental-upgrade", "models-from-image", "monitoring"]),
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
        assert of_kind(manifests, "PersistentVolumeClaim") == []


def test_every_component_is_combined() -> None:
    components = {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}
    assert {component for _, combined in COMBINATIONS for component in combined} | {"high-availability"} == components
