"""`make serve` once its models are compiled: a text is the same as before, and comes sooner."""

import json
import time
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from deployments.cli.commands import app
from tests.e2e.servers import serving

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

COMPILED_WITHIN_S = 400
"""Of a core that nothing else needs, compiling both models takes 80 s."""
PLAIN = {"prompt": "Up betimes and to my office,", "max_tokens": 200, "temperature": 0.7, "seed": 1, "ignore_eos": True}
PLAIN |= {"return_token_ids": True, "speculative": {"enabled": False}}


def decode(url: str) -> tuple[list[int], float]:
    """Return the tokens of a text, and how many of them come in a second; the best of three."""
    speeds = []
    for _ in range(3):
        started = time.monotonic()
        answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=PLAIN, timeout=120).json()
        speeds.append(PLAIN["max_tokens"] / (time.monotonic() - started))  # type: ignore[operator]
    return answer["choices"][0]["token_ids"], max(speeds)


def test_a_compiled_server_writes_the_same_text_sooner(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(tmp_path / "log", "compile=auto") as server:
        eager_ids, eager_speed = decode(server.url)
        deadline = time.monotonic() + COMPILED_WITHIN_S
        while "compiling" in httpx.get(f"{server.url}/health", timeout=30).text:
            assert time.monotonic() < deadline, server.log.read_text()
            time.sleep(1)
        compiled_ids, compiled_speed = decode(server.url)
        assert compiled_ids == eager_ids
        assert compiled_speed > 1.5 * eager_speed
        findings = json.loads(CliRunner().invoke(app, ["doctor", "--url", server.url, "--json"]).output)
        assert {one["level"] for one in findings if one["subject"] == "pace"} == {"ok"}
