"""The serveConfigV2 of each overlay, submitted as KubeRay does, on Ray nodes like its pods, and called by a client."""

from pathlib import Path

import openai
import pytest

from tests.k8s.manifests import K8S, OVERLAYS, build, cluster_of, groups_of, has_kustomize, of_kind
from tests.k8s.ray_nodes import KEY, ray_pods
from tests.k8s.serving_rules import app_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
]

PROMPT = "This PEP proposes"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_of_an_overlay_serves(overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (service,) = of_kind(build(K8S / "overlays" / overlay), "RayService")
    groups = groups_of(cluster_of(service))
    with ray_pods(service, monkeypatch) as pods:
        pods.add_pods(**{name: group["minReplicas"] for name, group in groups.items() if name != "head"})
        pods.deploy(tmp_path / "keys")
        routers = pods.nodes_of("Router")
        assert len(routers) == app_config(service).autoscaling.min_replicas
        assert len(set(routers)) == len(routers), "one pod holds one replica"
        url = f"http://127.0.0.1:{pods.port}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, timeout=60) as client:
            (model,) = client.models.list()
            chunks = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, seed=1, stream=True)
            assert len("".join(chunk.choices[0].text for chunk in chunks)) > 24
        with (
            openai.OpenAI(base_url=url, api_key="another", timeout=60) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
