"""`python -m tests.load.ci`: start the bundled pair, load it with and without drafts, and check every text.

It takes about a minute. Arguments are added to those of `python -m tests.load`.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.servers import Server
from tests.load.__main__ import main

ARGUMENTS = (
    *("--arms", "off,adaptive", "--turns", "2", "--requests", "24", "--concurrency", "4", "--max-tokens", "32"),
    *("--temperature", "0.7", "--slo", "ttft=10000,e2e=60000", "--reference", "engine"),
)


def run(arguments: Sequence[str]) -> int:
    """Serve, measure, stop; returns the exit status of the load test, or 1 if the server did not end well."""
    with tempfile.TemporaryDirectory(prefix="paceline-load-") as folder:
        server = Server(Path(folder) / "log.txt")
        try:
            server.wait_until_ready()
            status = main(["--url", server.url, *ARGUMENTS, *arguments])
            server.send(signal.SIGINT)
            return status or server.wait_until_gone()
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
