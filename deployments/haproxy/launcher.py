"""Program `launcher.py HAPROXY ERROR_FOLDER BOUNDS -f CONFIG ...`: mend Serve's configuration, then be HAProxy.

Serve has no settings for what is mended here:

- It opens the metrics and the statistics to every network. They are for this machine only.
- It gives a client an hour to send its headers, and as many connections as it wants.
- It answers in plain text where clients expect JSON, and with 404 where no application runs yet, or any more.
- It leaves HAProxy running, on the server's port, when all of Ray is killed.
- Answers that HAProxy gives by itself have no request id.

This file imports only the standard library, because it runs at each change of replicas.
"""

import ctypes
import json
import math
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
NO_APPLICATION = "http-response deny deny_status 503 if { status 404 } { res.hdr(content-type) -m beg text/plain }"
"""Refuses what Serve's own proxy answers while it has no application; the Ingress answers 404 in JSON."""
REQUEST_IDS = (
    "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 }",
    "http-request set-header x-request-id req_%[uuid]"
    " unless { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$ }",
    "http-request set-var(txn.request_id) req.fhdr(x-request-id)",
    "http-after-response set-header x-request-id %[var(txn.request_id)] if { var(txn.request_id) -m found }",
)
"""The rules of `deployments/request_id.py`, for answers that no Ingress gives."""


@dataclass(frozen=True)
class ClientBounds:
    """What one client may take.

    Attributes:
        header_timeout_s: seconds in which it must have sent the headers of a request.
        max_connections: connections from one address; None for any number.
    """

    header_timeout_s: float
    max_connections: int | None

    def rules(self) -> list[str]:
        """Return the lines of the frontend that close connections which are too many."""
        if self.max_connections is None:
            return []
        return [
            "stick-table type ipv6 size 100k expire 1m store conn_cur",
            "tcp-request connection track-sc0 src",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {self.max_connections} }}",
        ]


class TemplateError(Exception):
    """Serve's configuration lacks a line that this program replaces: it comes from another Ray release."""


def mend(config: str, error_folder: Path, bounds: ClientBounds) -> str:
    """Return Serve's configuration with private ports, bounds for clients, and the error files of a folder.

    A file `404.http` in the folder is the whole response, status line first, where HAProxy would answer 404 by itself.

    Raises:
        TemplateError: a line to replace is missing.
    """
    for section in ("frontend prometheus", "listen stats"):
        config = _replace(rf"^({section}\n\s+bind )\*?:", r"\g<1>127.0.0.1:", config)
    config = _replace(r"^\s+errorfile \d+ .*\n", "", config)
    lines = [f"errorfile {path.stem} {path}" for path in sorted(error_folder.glob("*.http"))]
    lines.append(f"timeout http-request {math.ceil(1000 * bounds.header_timeout_s)}ms")
    config = _replace(r"^defaults\n", "defaults\n" + "".join(f"    {line}\n" for line in lines), config)
    rules = "".join(f"    {rule}\n" for rule in (*bounds.rules(), *REQUEST_IDS, NO_APPLICATION))
    config = _replace(r"^(frontend http_frontend\n)", rf"\g<1>{rules}", config)
    return _replace(r"^(backend default_backend\n\s+http-request) return .*$", r"\g<1> deny deny_status 503", config)


def end_with_parent() -> None:
    """Make Linux end this process, also as HAProxy, when the process that started it dies.

    Raises:
        OSError: Linux refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == 1:
        sys.exit("the process that started HAProxy has ended")


def _replace(pattern: str, replacement: str, text: str) -> str:
    replaced, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if not count:
        raise TemplateError(f"no line matches {pattern!r}")
    return replaced


def main() -> None:
    """Replace this process by HAProxy, which Serve watches by its process id."""
    end_with_parent()
    haproxy, error_folder, bounds, *arguments = sys.argv[1:]
    path = Path(arguments[arguments.index("-f") + 1])
    path.write_text(mend(path.read_text(), Path(error_folder), ClientBounds(**json.loads(bounds))))
    os.execv(haproxy, [haproxy, *arguments])


if __name__ == "__main__":
    main()
