"""FakeServer: an OpenAI-compatible server on a real socket, whose text, drafts and failures a test decides."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_CHUNK = 3
NUM_DRAFTED, NUM_ACCEPTED = 4, 2
TEMPLATE_TOKENS = 7
CHARS_PER_TOKEN = 4
PAUSE_S = 0.003
"""Between chunks, so that a client does not receive them in one piece."""


class FakeServer(ThreadingHTTPServer):
    """Writes words that follow from prompt and seed; a token is a word.

    Attributes:
        has_extensions: whether it takes the fields of `extension_fields`; else they are refused with 400.
        reason: of its rounds, as Paceline's metrics have it.
        failures: for generation requests by number, from 1 on: a status, or `cut`, `error event`, `stall`, `no usage`,
            `bad event`.
        wrong_words: whether it writes other words than it should, if drafts are on.
        bodies: the generation requests so far.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.has_extensions = True
        self.reason = "goodput"
        self.failures: dict[int, int | str] = {}
        self.wrong_words = False
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_drafts = 0
        self.num_rounds = 0
        self.is_closing = threading.Event()
        self.lock = threading.Lock()

    def metrics(self) -> str:
        counts = {"drafts": 1, "draft_tokens": NUM_DRAFTED, "accepted_tokens": NUM_ACCEPTED}
        lines = [f"vllm:spec_decode_num_{name}_total {self.num_drafts * count}" for name, count in counts.items()]
        lines.append(f'paceline:rounds_by_draft_length_total{{reason="{self.reason}"}} {self.num_rounds}')
        return "\n".join([*lines, ""])


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake server")
    thread.start()
    try:
        yield server
    finally:
        server.is_closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


COMPILING = {"routers": [{}, {"compiling": {"done": 1, "of": 6, "left_s": 40}}]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        answers = {
            "/v1/models": json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}]}),
            "/version": json.dumps({"version": "0.1.0", "device": "cpu"}),
            "/health": json.dumps(COMPILING) if self.server.has_extensions else "",
            "/metrics": self.server.metrics(),
        }
        self._answer(200 if self.path in answers else 404, answers.get(self.path, ""))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(self.headers["authorization"])
            failure = self.server.failures.get(len(self.server.bodies))
        if not self.server.has_extensions and body.keys() & {"speculative", "cache_salt"}:
            self._answer(400, '{"error": {"message": "unknown field"}}')
        elif isinstance(failure, int):
            self._answer(failure, '{"error": {"message": "on demand"}}', {"retry-after": "0.01"})
        elif body.get("stream"):
            self._stream(body, failure)
        else:
            self._answer(200, json.dumps({"choices": [], "usage": _usage(body, 1)}))

    def _answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any], failure: str | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        if failure == "stall":
            self.server.is_closing.wait(30)
            return
        is_drafted = body.get("speculative", {}).get("enabled") is not False
        words = _words(body, is_wrong=self.server.wrong_words and is_drafted)
        for first in range(0, len(words), TOKENS_PER_CHUNK):
            if first:
                time.sleep(PAUSE_S)
            self._send_chunk(body, words, first, failure)
            with self.server.lock:
                self.server.num_rounds += 1
                self.server.num_drafts += is_drafted
            if failure == "cut":
                return
            if failure == "bad event":
                self.wfile.write(b"data: {oops\n\n")
            if failure == "error event":
                self._event({"error": {"message": "lost", "code": "lost"}})
                break
        last: dict[str, Any] = {"choices": []}
        if failure != "no usage":
            last["usage"] = _usage(body, len(words))
        if "speculative" in body:
            last["metrics"] = {"speculative_decoding": _figures(len(words) if is_drafted else 0)}
        self._event(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_chunk(self, body: dict[str, Any], words: list[str], first: int, failure: str | None) -> None:
        piece = words[first : first + TOKENS_PER_CHUNK]
        text = "".join(piece)
        choice = {"index": 0, "finish_reason": "length" if first + len(piece) == len(words) else None}
        choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
        event: dict[str, Any] = {"choices": [choice]}
        if body.get("stream_options", {}).get("continuous_usage_stats") and failure != "no usage":
            event["usage"] = _usage(body, first + len(piece))
        if body.get("return_token_ids") and first == 0:
            event["prompt_token_ids"] = [5, 6]
        self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        # A comment, and U+2028 raw in JSON: both are allowed, and both have confused clients.
        self.wfile.write(f": comment\n\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()


def _words(body: dict[str, Any], *, is_wrong: bool) -> list[str]:
    source = json.dumps([body.get("prompt", body.get("messages")), body.get("seed")])
    digest = hashlib.sha256(source.encode()).hexdigest() * (1 + body["max_tokens"] // 64)
    words = [f"{letter}\u2028" for letter in digest[: body["max_tokens"]]]
    return [*words[:-1], "wrong"] if is_wrong else words


def _usage(body: dict[str, Any], num_tokens: int) -> dict[str, int]:
    text = body["prompt"] if "prompt" in body else "".join(message["content"] for message in body["messages"])
    count = len(text) // CHARS_PER_TOKEN + (TEMPLATE_TOKENS if "messages" in body else 0)
    return {"prompt_tokens": count, "completion_tokens": num_tokens, "total_tokens": count + num_tokens}


def _figures(num_tokens: int) -> dict[str, Any]:
    steps = -(-num_tokens // TOKENS_PER_CHUNK)
    return {
        "num_spec_steps": steps,
        "num_draft_tokens": steps * NUM_DRAFTED,
        "num_accepted_draft_tokens": steps * NUM_ACCEPTED,
    }
