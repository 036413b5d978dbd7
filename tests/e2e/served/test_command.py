"""`paceline` against the bundled pair, as in a pipe."""

import subprocess
import sys

import httpx
import pytest

from tests.e2e.servers import ROOT, Server

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

PROGRAM = "from deployments.cli.commands import main; main()"


def paceline(*words: str, typed: str = "") -> str:
    command = [sys.executable, "-c", PROGRAM, *words]
    ended = subprocess.run(command, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_text_is_continued_as_the_api_does(server: Server) -> None:
    words = ("--url", server.url, "--max-tokens", "24", "--seed", "1", "--temperature", "0.7")
    body = {"prompt": "Call me", "max_tokens": 24, "seed": 1, "temperature": 0.7}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert paceline("complete", "Call me", *words) == f"{text}\n"
