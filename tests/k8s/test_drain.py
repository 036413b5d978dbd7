"""The preStop hook of a worker: its replicas move to another pod, and no stream is cut."""

import asyncio
import os
import sys
from pathlib import Path

import openai
import pytest

from tests.k8s.manifests import K8S, build, has_kustomize, of_kind
from tests.k8s.ray_nodes import KEY, ray_pods

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
]

TOKENS = 400
STREAMS = 2


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
