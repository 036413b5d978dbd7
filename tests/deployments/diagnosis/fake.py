"""FakePaceline: a server in this process, whose tokens follow from prompt, temperature and seed."""

import hashlib
import json
import threading
from typing import Any

import httpx

from deployments.diagnosis.http_client import Client

CHUNK = 3
K = 4


def difference(position: int, token_id: int, target_token_id: int, margin: float) -> dict[str, Any]:
    tokens = {"token": f"<{token_id}>", "target_token_id": target_token_id, "target_token": f"<{target_token_id}>"}
    return {"position": position, "token_id": token_id, **tokens, "margin": margin}


def audit_body(differences: list[dict[str, Any]], num_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The answer of /v1/audit."""
    plain = {"index": 0, "num_tokens": num_tokens, "problems": [], "logprobs_apart": 0.0, "is_tokenized": False}
    server = {"object": "audit", "system_fingerprint": "fp_1", "recorded_fingerprint": "fp_0"}
    return {**server, "choices": [{**plain, "differences": differences, **fields}]}


class FakePaceline:
    """Answers what `deployments.diagnosis` asks.

    Attributes:
        falsified: positions whose tokens are wrong in requests that are streamed, by whether they are.
        length, reason: of rounds whose draft length the request leaves open.
        draft_s, plain_s: seconds of a round with a draft, which brings 3 tokens, and of one without.
        num_drafted: draft tokens of an answer with drafts.
        compiling: what `/health` says of a Router's compiling, if anything.
        demo_status: of /demo/kill without a process.
        audit_statuses: of the next audits, before they are done.
        num_audits: how many were done.
    """

    def __init__(self) -> None:
        self.falsified: dict[bool, int] = {}
        self.fingerprint, self.is_ready, self.demo_status = "fp_1", True, 400
        self.metrics: dict[str, float] = {}
        self.audit_statuses: list[int] = []
        self.num_audits = 0
        self.killed: list[str] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.draft_s, self.plain_s = 2.0, 1.0
        self.num_drafted = 8
        self.length, self.reason = "4", "goodput"
        self.num_parameters: int | None = 10**9
        self.compiling: dict[str, Any] = {}
        self.client = Client("http://fake", "key", transport=httpx.MockTransport(self.answer))

    def count(self, name: str, value: float) -> None:
        with self.lock:
            self.metrics[name] = self.metrics.get(name, 0.0) + value

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.keys.add(request.headers.get("authorization"))
        body = json.loads(request.content or b"{}")
        match request.url.path:
            case "/health":
                router = {"replica": "r1", "reason": None if self.is_ready else "recovering", **self.compiling}
                known = {"ready": self.is_ready, "reason": router["reason"], "routers": [router]}
                return httpx.Response(200 if self.is_ready else 503, json=known)
            case "/version":
                return httpx.Response(200, json={"version": "0.1.0", "num_parameters": self.num_parameters})
            case "/metrics":
                return httpx.Response(200, text="".join(f"{name} {value}\n" for name, value in self.metrics.items()))
            case "/v1/audit":
                return self.audit(body)
            case "/demo/kill":
                self.killed += [body["process"]] if body else []
                return httpx.Response(202 if body else self.demo_status, json={})
            case "/v1/completions" | "/v1/chat/completions":
                return self.generate(body)
        return httpx.Response(404, text="no such route")

    def ids_of(self, body: dict[str, Any]) -> list[int]:
        ids = hashlib.sha256(repr([body[n] for n in ("prompt", "temperature", "seed")]).encode()).digest()
        return list(ids[: body["max_tokens"]])

    def audit(self, record: dict[str, Any]) -> httpx.Response:
        with self.lock:
            if self.audit_statuses:
                return httpx.Response(self.audit_statuses.pop(), json={"error": {"message": "seed is missing"}})
            self.num_audits += 1
        pairs = zip(record["choices"][0]["token_ids"], self.ids_of(record["body"]), strict=True)
        differences = [
            difference(position, *pair, margin=0.01 * position)
            for position, pair in enumerate(pairs)
            if pair[0] != pair[1]
        ]
        return httpx.Response(200, json=audit_body(differences, len(record["choices"][0]["token_ids"])))

    def generate(self, body: dict[str, Any]) -> httpx.Response:
        ids = self.ids_of(body)
        if (at := self.falsified.get(bool(body.get("stream")))) is not None:
            ids[at] += 1
        speculative = body.get("speculative", {})
        is_plain = speculative.get("enabled") is False or speculative.get("num_speculative_tokens") == 0
        self.observe(len(ids), has_draft=not is_plain)
        common = {"model": "tiny", "system_fingerprint": self.fingerprint}
        num_drafted = 0 if is_plain else self.num_drafted
        metrics: dict[str, Any] = {"speculative_decoding": {"num_spec_tokens": K, "num_draft_tokens": num_drafted}}
        fields = {"metrics": metrics}
        if speculative.get("record"):
            choices = [{"token_ids": ids, "finish_reason": "length"}]
            fields["record"] = {"path": "/v1/completions", "body": body, "seconds": 0.5, "choices": choices}
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(map(chr, ids)), "token_ids": ids}
            return httpx.Response(200, json=common | {"choices": [choice], **fields})
        pieces = [ids[first : first + CHUNK] for first in range(0, len(ids), CHUNK)]
        events = [common | {"choices": [{"index": 0, "text": "\u2028", "token_ids": piece}]} for piece in pieces]
        events += [common | {"choices": [], **fields}] if "stream_options" in body else []
        lines = [f"id: 1\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        return httpx.Response(200, content="".join([": hello\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def observe(self, num_tokens: int, *, has_draft: bool) -> None:
        rounds = num_tokens / (3 if has_draft else 1)
        latency = "vllm:inter_token_latency_seconds"
        self.count(f"{latency}_count", rounds)
        self.count(f"{latency}_sum", rounds * (self.draft_s if has_draft else self.plain_s))
        length, reason = (self.length, self.reason) if has_draft else ("0", "request")
        labels = f'num_draft_tokens="{length}",reason="{reason}",replica="r1"'
        self.count(f"paceline:rounds_by_draft_length_total{{{labels}}}", rounds)
        if has_draft:
            self.count("vllm:spec_decode_num_accepted_tokens_total", 2 * rounds)
            self.count("vllm:spec_decode_num_drafts_total", rounds)
            for position in ("0", "1"):
                self.count(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}', rounds)
