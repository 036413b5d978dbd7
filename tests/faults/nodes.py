"""NodeServer: the application on several nodes, which are processes of this machine."""

import os
from collections.abc import Mapping
from unittest.mock import patch

import psutil
from ray.cluster_utils import Cluster

from deployments.config import AppConfig
from deployments.local.environment import serve_environment
from tests.faults.server import FaultServer

_STORE_BYTES = 80 * 2**20


class NodeServer(FaultServer):
    """A head for Serve, the Ingress and the proxy, and nodes with room for one speculation group each."""

    def __init__(
        self, num_target_nodes: int, node_variables: Mapping[str, str] | None = None, **arguments: object
    ) -> None:
        """Start the nodes, with environment variables for Ray's own processes, and the application on them."""
        variables = serve_environment(AppConfig())
        self._node_variables = {**variables, **(node_variables or {})}
        with patch.dict(os.environ, self._node_variables):
            self._cluster = Cluster()
        self._add_nodes(1, "head", num_cpus=4)
        self._add_nodes(num_target_nodes, "target", num_cpus=1)
        variables |= {"RAY_ADDRESS": self._cluster.address}
        labels = {"target": {"pool": "target"}, "draft": {"pool": "target"}, "ingress": {"pool": "head"}}
        try:
            super().__init__(variables, label_selector=labels, **arguments)
        except BaseException:
            self.stop_nodes()
            raise

    def _add_nodes(self, number: int, pool: str, *, num_cpus: int) -> None:
        with patch.dict(os.environ, self._node_variables):
            for _ in range(number):
                self._cluster.add_node(
                    num_cpus=num_cpus, labels={"pool": pool}, object_store_memory=_STORE_BYTES, include_dashboard=False
                )
            self._cluster.wait_for_nodes()

    @property
    def root(self) -> psutil.Process:
        """This process, which has started the nodes."""
        return psutil.Process()

    def close(self) -> None:
        super().close()
        self.stop_nodes()

    def stop_nodes(self) -> None:
        self._cluster.shutdown()
