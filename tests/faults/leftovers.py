"""Belongings: what the processes of one server have opened, and what is left of it after the server has ended."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.server import FaultServer, title_of

_MARK = "PACELINE_FAULT_SERVER"
SHARED_MEMORY = "/dev/shm/"
_NOT_OURS = ("ray", "pymp-", "torchinductor_")
"""Ray's sessions and its dashboard's folders, and torch's cache."""
END_S = 10.0
"""How long the last of Ray's helpers may take to notice that their parents have ended."""
ROLES = ("DraftWorker", "TargetWorker", ":Router", ":Ingress", "ServeController", "ProxyActor")


class Belongings:
    """Everything that a server's processes have, found by a variable in their environment and by their own folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        self._shared: set[str] = set()
        self.variables = {_MARK: secrets.token_hex(8), "TMPDIR": self._folder.name}

    def note(self) -> None:
        for process in self.processes():
            self._shared |= {path for path in _open_paths(process.pid) if path.startswith(SHARED_MEMORY)}

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes, those included whose parents have ended."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def left(self) -> list[str]:
        """Return what is still there after the next process has started, and remove the folder.

        A worker that is killed while it starts leaves its scratch folder to the next process
        (`engine.execution.scratch`).
        """
        deadline = time.monotonic() + END_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        found = [f"process {process.pid}: {title_of(process)[:80]}" for process in self.processes()]
        found += [f"shared memory: {path}" for path in sorted(self._shared) if os.path.exists(path)]
        next_process = "from engine.execution.scratch import scratch_folder; scratch_folder().cleanup()"
        environment = os.environ | {"TMPDIR": self._folder.name}
        subprocess.run([sys.executable, "-c", next_process], cwd=Path(__file__).parents[2], env=environment, check=True)
        names = sorted(path.name for path in Path(self._folder.name).iterdir())
        found += [f"temporary file: {name}" for name in names if not name.startswith(_NOT_OURS)]
        self._folder.cleanup()
        return found

    def _is_mine(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            return is_alive and process.environ().get(_MARK) == self.variables[_MARK]
        return False


def count_roles(server: FaultServer) -> dict[str, int]:
    return {role: len(server.processes(role)) for role in ROLES}


def half_closed(server: FaultServer) -> list[str]:
    """Return the connections that the other side has closed and this one has forgotten."""
    return [
        f"a half-closed connection of {role}"
        for role in ROLES
        for process in server.processes(role)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_CLOSE_WAIT
    ]


def count_files(server: FaultServer, role: str) -> int:
    return sum(process.num_fds() for process in server.processes(role))


def _open_paths(pid: int) -> Iterator[str]:
    """Yield the paths that a process maps or has open; nothing once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            yield line[line.find("/") :] if "/" in line else ""
        for link in Path(f"/proc/{pid}/fd").iterdir():
            yield os.readlink(link)
