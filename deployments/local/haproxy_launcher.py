"""Program `haproxy_launcher.py HAPROXY -f CONFIG ...`: makes `CHANGES` to Serve's configuration and becomes HAProxy.

Serve (2.60) has no setting for request ids, private metrics, a short time limit for headers, or 503 in JSON. Splicing
is off (`-dS`), because with it HAProxy 2.8 misses some clients that leave, and takes most of a core until their answers
come. Only the standard library is imported, because this program runs at each change of replicas.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
HEADER_TIMEOUT_S = 10
NO_APPLICATION = "http-response deny deny_status 503 if { status 404 } { res.hdr(content-type) -m beg text/plain }"
"""Serve's own proxy answers 404 in plain text while it has no application; the Ingress answers 404 in JSON."""
REQUEST_IDS = (
    "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 }",
    "http-request set-header x-request-id req_%[uuid]"
    " unless { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$ }",
    "http-request set-var(txn.request_id) req.fhdr(x-request-id)",
    "http-after-response set-header x-request-id %[var(txn.request_id)] if { var(txn.request_id) -m found }",
)
"""The rules of `deployments/guard/middleware.py`, for answers that come from no Ingress."""
CHANGES = (
    ("\ndefaults\n", f"\ndefaults\n    timeout http-request {HEADER_TIMEOUT_S}s\n"),
    ("\nfrontend prometheus\n    bind :", "\nfrontend prometheus\n    bind 127.0.0.1:"),
    ("\nlisten stats\n  bind *:", "\nlisten stats\n  bind 127.0.0.1:"),
    ("\nfrontend http_frontend\n", "\n    ".join(("\nfrontend http_frontend", *REQUEST_IDS, NO_APPLICATION)) + "\n"),
    ("\nbackend default_backend\n", "\nbackend default_backend\n    http-request deny deny_status 503\n"),
)
"""Texts that Serve's configuration contains once, and their replacements; other releases of Ray may lack them."""
MESSAGE = "no replica is ready, or the one that handled this request was lost; try again"
BODY = f'{{"error": {{"message": "{MESSAGE}", "type": "server_error", "param": null, "code": "unavailable"}}}}'
HEAD = f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\nRetry-After: 1"
ANSWER = f"HTTP/1.1 503 Service Unavailable\r\n{HEAD}\r\n\r\n{BODY}".encode()
"""What HAProxy answers without an Ingress."""


def complete(config: str) -> str:
    """Return Serve's configuration with all `CHANGES`; raise ValueError if a text to change is missing."""
    for text, replacement in CHANGES:
        if config.count(text) != 1:
            raise ValueError(f"Serve's configuration has {text!r} {config.count(text)} times instead of once")
        config = config.replace(text, replacement)
    return config


def end_with_parent() -> None:
    """Make Linux end this process, also as HAProxy, when its parent dies; raise OSError if Linux refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == 1:
        sys.exit("the process that started HAProxy has ended")


def main() -> None:
    """Replace this process by HAProxy, which Serve watches by its process id."""
    end_with_parent()
    haproxy, *arguments = sys.argv[1:]
    config = Path(arguments[arguments.index("-f") + 1])
    config.write_text(complete(config.read_text()))
    # Serve's configuration names this file for every status that HAProxy sends without an Ingress.
    config.with_name("500.http").write_bytes(ANSWER)
    os.execv(haproxy, [haproxy, "-dS", *arguments])


if __name__ == "__main__":
    main()
