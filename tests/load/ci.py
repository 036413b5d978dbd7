"""`python -m tests.load.ci`: start the bundled pair, load it with and without drafts, and audit every text.

The pair is compiled first, where that was not done before, so that what is measured is what a server computes once it
has been up for a while. Then it takes about a minute. Arguments are added to those of `python -m tests.load`.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.e2e.servers import ROOT, Server
from tests.load.__main__ import main

ARGUMENTS = (
    *("--arms", "off,adaptive", "--turns", "2", "--requests", "24", "--concurrency", "4", "--max-tokens", "32"),
    *("--temperature", "0.7", "--slo", "ttft=10000,e2e=60000", "--reference", "engine"),
)


def run(arguments: Sequence[str], *settings: str) -> int:
    """Serve, measure, stop; returns the exit status of the load test, or 1 if the server did not end well.

    Args:
        settings: of the server.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-load-") as folder:
        server = Server(Path(folder) / "log.txt", *settings)
        try:
            server.wait_until_ready()
            status = main(["--url", server.url, *ARGUMENTS, *arguments])
            server.send(signal.SIGINT)
            return status or server.wait_until_gone()
        finally:
            server.kill()


def compile_pair() -> str:
    """Compile the bundled pair; return the setting to serve it with: eager passes if it cannot be compiled."""
    sys.stdout.write("compiling the pair, where that was not done before\n")
    command = [sys.executable, "-m", "engine.execution.cpu", str(BUNDLED_TARGET), str(BUNDLED_DRAFT)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.stdout.write(f"measuring eager passes (compile=off): {ended.stderr.strip().splitlines()[-1]}\n")
        return "compile=off"
    sys.stdout.write("measuring compiled passes (compile=auto, the default)\n")
    return "compile=auto"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], compile_pair()))
