"""Every kustomization of `k8s/` is one that Kubernetes, KubeRay, Serve and the application accept and have room for."""

import pytest

from tests.k8s import schemas
from tests.k8s.manifests import K8S, KUSTOMIZATIONS, build, has_kustomize
from tests.k8s.problems import problems

pytestmark = [
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
    pytest.mark.skipif(not schemas.CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {schemas.CRDS}"),
]


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_nothing_is_wrong_with_a_kustomization(kustomization: str) -> None:
    assert problems(build(K8S / kustomization)) == []
