"""The serveConfigV2 of each overlay, submitted as KubeRay does, on Ray nodes like its pods, and called by a client."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.k8s.dockerfile import stage, variables
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, Manifest, build, cluster_of, groups_of, has_kustomize, of_kind
from tests.k8s.serving_rules import app_config, serve_config, worker_nodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations"),
]

KEY = "a-key-of-this-test"
START_S = 240
STORE_BYTES = 80 * 2**20
PROMPT = "This PEP proposes"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def nodes_like_pods(service: Manifest) -> Iterator[str]:
    """Start a Ray node for each pod that the autoscaler starts at first; yield the dashboard's address."""
    cluster = cluster_of(service)
    groups = {name: group for name, group in groups_of(cluster).items() if name != "head"}
    port = free_port()
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "object_store_memory": STORE_BYTES}
    ray_nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in worker_nodes(cluster, {name: group["minReplicas"] for name, group in groups.items()}).values():
            resources = dict(node.resources)
            cpus, gpus = resources.pop("CPU"), resources.pop("GPU", 0)
            resources.pop("memory")
            sizes = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": STORE_BYTES}
            ray_nodes.add_node(**sizes, resources=resources, labels=dict(node.labels), include_dashboard=False)
        ray_nodes.wait_for_nodes()
        ray.init(address=ray_nodes.address, logging_level="WARNING")
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()
        ray_nodes.shutdown()


def on_this_machine(config: dict[str, Any], *, port: int, keys: Path) -> dict[str, Any]:
    """Return a configuration with the bundled pair on the CPU, this port and these keys, else unchanged."""
    (application,) = config["applications"]
    args = {name: value for name, value in application["args"].items() if not name.endswith("accelerator_type")}
    args |= {"api_key_file": str(keys), "compile": "off", "device": "cpu"}
    if "target_model" in args:
        args |= {"target_model": str(BUNDLED_TARGET), "draft_model": str(BUNDLED_DRAFT), "tensor_parallel_size": 2}
    http = {"host": "127.0.0.1", "port": port}
    return {**config, "http_options": http, "applications": [{**application, "args": args}]}


def wait_until(condition: Callable[[], bool], state: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.5)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_configuration_of_an_overlay_serves(overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (service,) = of_kind(build(K8S / "overlays" / overlay), "RayService")
    for name, value in variables(stage(K8S / "Dockerfile", "cpu")).items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    port = free_port()
    with nodes_like_pods(service) as dashboard:
        serve = ServeSubmissionClient(dashboard)
        serve.deploy_applications(on_this_machine(serve_config(service), port=port, keys=keys))

        def application() -> dict[str, Any]:
            applications: dict[str, Any] = serve.get_serve_details()["applications"]
            return applications.get("paceline", {})

        wait_until(lambda: application().get("status") == "RUNNING", application)
        routers = application()["deployments"]["Router"]["replicas"]
        assert len(routers) == app_config(service).autoscaling.min_replicas
        assert len({router["node_id"] for router in routers}) == len(routers), "one pod holds one replica"
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, timeout=60) as client:
            (model,) = client.models.list()
            chunks = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=24, seed=1, stream=True)
            assert len("".join(chunk.choices[0].text for chunk in chunks)) > 24
        with (
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="another", timeout=60) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
