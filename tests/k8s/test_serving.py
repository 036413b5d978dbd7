"""The serveConfigV2 of each overlay, submitted as KubeRay does, on Ray nodes like its pods; pods that drain."""

import asyncio
import os
import sys
from pathlib import Path

import openai
import pytest

from tests.k8s.manifests import K8S, OVERLAYS, build, cluster_of, groups_of, needs_kustomize, of_kind
from tests.k8s.ray_nodes import KEY, ray_pods
from tests.k8s.serving_rules import app_config

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.filterwarnings("ignore"), needs_kustomize]

PROMPT = "This PEP proposes"
TOKENS = 400
STREAMS = 2


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


async def stream_until(client: openai.AsyncOpenAI, end: asyncio.Event) -> int:
    """Stream one text after another; return how many came whole."""
    count = 0
    while not end.is_set():
        options = {"ignore_eos": True, "min_tokens": TOKENS}
        stream = await client.completions.create(
            model="paceline", prompt="Call me", max_tokens=TOKENS, stream=True, extra_body=options
        )
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length"
        count += 1
    return count


async def test_a_pod_that_ends_cuts_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (service,) = of_kind(build(K8S / "overlays" / "cpu"), "RayService")
    with ray_pods(service, monkeypatch) as pods:
        nodes = set(pods.add_pods(target=2))
        await asyncio.to_thread(pods.deploy, tmp_path / "keys")
        (old,) = pods.nodes_of("Router")
        end = asyncio.Event()
        url = f"http://127.0.0.1:{pods.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, timeout=120, max_retries=0) as client:
            streams = [asyncio.create_task(stream_until(client, end)) for _ in range(STREAMS)]
            command = [str(K8S / "drain.py"), "--node-id", old, "--deadline-s", "700"]
            environment = {**os.environ, "RAY_ADDRESS": pods.address}
            drain = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
            assert await asyncio.wait_for(drain.wait(), 300) == 0
            assert set(pods.nodes_of("Router") + pods.nodes_of("Ingress")) == nodes - {old}
            end.set()
            counts = await asyncio.gather(*streams)
        assert all(counts)
