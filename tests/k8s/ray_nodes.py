"""RayPods: Ray nodes with the resources and labels of pods, and an application submitted to them as KubeRay does it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from cluster.capacity import Node
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.e2e.servers import free_port
from tests.k8s.dockerfile import stage, variables
from tests.k8s.manifests import K8S, ROOT, Manifest, cluster_of, groups_of
from tests.k8s.serving_rules import serve_config, worker_nodes

KEY = "a-key-of-this-test"
START_S = 240
STORE_BYTES = 80 * 2**20


class RayPods:
    """The head and the workers of a RayService, and Serve on them."""

    def __init__(self, service: Manifest) -> None:
        self._service = service
        self._groups = [name for name in groups_of(cluster_of(service)) if name != "head"]
        port = free_port()
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._dashboard = f"http://127.0.0.1:{port}"
        self.port = free_port()

    def add_pods(self, **counts: int) -> list[str]:
        """Start so many pods of each group, and return the ids of their nodes."""
        counts = dict.fromkeys(self._groups, 0) | counts
        nodes = worker_nodes(cluster_of(self._service), counts)
        started = [self._add(node) for node in nodes.values()]
        self._cluster.wait_for_nodes()
        return started

    def deploy(self, keys: Path) -> None:
        """Submit serveConfigV2, and wait until the application runs.

        It has the bundled pair on the CPU, computed by torch, instead of its models, another port, and one key.
        """
        keys.write_text(KEY)
        config = on_this_machine(serve_config(self._service), port=self.port, keys=keys)
        ServeSubmissionClient(self._dashboard).deploy_applications(config)
        deadline = time.monotonic() + START_S
        while (application := self.application()).get("status") != "RUNNING":
            assert time.monotonic() < deadline, application
            time.sleep(0.5)

    def application(self) -> dict[str, Any]:
        details = ServeSubmissionClient(self._dashboard).get_serve_details()
        application: dict[str, Any] = details["applications"].get("paceline", {})
        return application

    def nodes_of(self, deployment: str) -> list[str]:
        return [replica["node_id"] for replica in self.application()["deployments"][deployment]["replicas"]]

    def end(self) -> None:
        self._cluster.shutdown()

    def _add(self, node: Node) -> str:
        resources = dict(node.resources)
        cpus, gpus = resources.pop("CPU"), resources.pop("GPU", 0)
        resources.pop("memory")
        sizes = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": STORE_BYTES}
        added = self._cluster.add_node(**sizes, resources=resources, labels=dict(node.labels), include_dashboard=False)
        node_id: str = added.node_id
        return node_id


@contextmanager
def ray_pods(service: Manifest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayPods]:
    """Start the head of a RayService, with the environment of the image; stop everything at the end."""
    for name, value in variables(stage(K8S / "Dockerfile", "cpu")).items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pods = RayPods(service)
    try:
        ray.init(address=pods.address, logging_level="WARNING")
        yield pods
    finally:
        ray.shutdown()
        pods.end()


def on_this_machine(config: dict[str, Any], *, port: int, keys: Path) -> dict[str, Any]:
    """Return a configuration with the bundled pair on the CPU, this port and these keys, else unchanged."""
    (application,) = config["applications"]
    args = dict(application["args"])
    args |= {"api_key_file": str(keys), "compile": "off", "device": "cpu"}
    if "target_model" in args:
        args |= {"target_model": str(BUNDLED_TARGET), "draft_model": str(BUNDLED_DRAFT), "execution": "torch"}
        args["tensor_parallel_size"] = min(args.get("tensor_parallel_size", 1), 2)
    http = {"host": "127.0.0.1", "port": port}
    return {**config, "http_options": http, "applications": [{**application, "args": args}]}
