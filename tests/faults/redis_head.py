"""RedisServer: the application on a head whose state is in Redis, and whose GCS is started again when it has ended."""

import subprocess
import tempfile
import threading
from pathlib import Path

from tests.e2e.servers import free_port
from tests.faults.nodes import NodeServer

GCS_DOWN_S = 3.0
"""How long there is no GCS: about what a container's restart takes."""
MAX_REPLICAS = 2


class RedisServer(NodeServer):
    """A head, and nodes for two groups. A thread starts the head's GCS again when it has ended, as Kubernetes does."""

    def __init__(self, **arguments: object) -> None:
        """Start Redis, the nodes and the application; the arguments are the application's."""
        self._redis_folder = tempfile.TemporaryDirectory(prefix="redis-")
        port = free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", self._redis_folder.name]
        log = Path(self._redis_folder.name, "log")
        self._redis = subprocess.Popen([*command, "--logfile", str(log), "--save", "", "--appendonly", "no"])
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep_gcs, daemon=True)
        variables = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        super().__init__(MAX_REPLICAS, variables, autoscaling={"max_replicas": MAX_REPLICAS}, **arguments)
        self._keeper.start()

    def stop_nodes(self) -> None:
        self._is_over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        super().stop_nodes()
        self._redis.terminate()
        self._redis.wait()
        self._redis_folder.cleanup()

    def _keep_gcs(self) -> None:
        """Start the GCS again whenever it has ended. It ends with the thread that has started it."""
        head = self._cluster.head_node
        while not self._is_over.wait(0.1):
            [gcs] = head.all_processes["gcs_server"]
            if gcs.process.poll() is not None and not self._is_over.wait(GCS_DOWN_S):
                head.kill_gcs_server(check_alive=False)
                head.start_gcs_server()
