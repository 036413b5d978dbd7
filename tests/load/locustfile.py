"""Locust users of an OpenAI-compatible server, for those who have Locust already. It stands alone:

    locust -f tests/load/locustfile.py --host http://127.0.0.1:8000 --headless --users 8 --spawn-rate 8 --run-time 60s

Locust shows TTFT and TPOT as requests of their own. `python -m tests.load` also counts latencies from when a request
was due, compares arms, and checks the texts.
"""

import json
import os
import time
from pathlib import Path

from locust import HttpUser, events, task

MILLISECONDS = 1000


@events.init_command_line_parser.add_listener
def add_options(parser):
    """Add the options of the requests to Locust's own."""
    default = Path(__file__).parents[2] / "engine" / "pair" / "prompts.txt"
    parser.add_argument("--model", default="paceline", help="the served model's name")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each text")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", default=str(default), help="a file whose prompts are parted by blank lines")


class StreamingUser(HttpUser):
    """Sends one completion after the other, as streams."""

    def on_start(self):
        """Read the prompts."""
        text = Path(self.environment.parsed_options.prompts).read_text()
        self.prompts = [prompt.strip("\n") for prompt in text.split("\n\n") if prompt.strip()]
        self.number = 0
        if key := os.environ.get("OPENAI_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"

    @task
    def complete(self):
        """Stream one completion."""
        options = self.environment.parsed_options
        body = {
            "model": options.model,
            "prompt": self.prompts[self.number % len(self.prompts)],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.number += 1
        started = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            self._read(response, started)

    def _read(self, response, started):
        first = last = None
        num_tokens = 0
        for line in response.iter_lines():
            if line == b"data: [DONE]":
                break
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                response.failure(str(event["error"]))
                return
            if any(choice["text"] for choice in event["choices"]):
                last = time.perf_counter()
                first = first or last
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        else:
            response.failure("the stream ended without [DONE]")
            return
        response.success()
        if first is not None:
            self._report("TTFT", first - started)
            if num_tokens > 1:
                self._report("TPOT", (last - first) / (num_tokens - 1))

    def _report(self, name, seconds):
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=seconds * MILLISECONDS,
            response_length=0,
            exception=None,
            context={},
        )
