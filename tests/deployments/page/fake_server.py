"""A server that answers as Paceline does, with the real page: streams of made-up rounds that can be cut and resumed."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from deployments.page.demo import add_demo
from deployments.page.page import add_page
from tests.deployments.serving import listening

STORY = (
    " and there find my wife and the maid at work upon the hangings. So to the office, where we sat all the morning,"
    " and then home to dinner; and after dinner by water to White Hall, and there walked long in the garden with"
    " Mr. Coventry, talking of the business of the navy, how badly it was paid, and how well it was yet done."
)
WRONG = [" then", " to", " it", " very", ", being", " my Lord", " up", " did"]


@dataclass
class Fake:
    """What the server does, and what it was asked."""

    round_s: float = 0.001
    pause_s: float = 0.05
    key: str | None = None
    cut_after: int | None = None
    """Events after which the next stream's connection is cut, once."""
    has_template: bool = True
    killed: list[str] = field(default_factory=list)
    requests: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    tokens: int = 0

    async def kill(self, process: str) -> bool:
        self.killed.append(process)
        return True

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream; the text depends on the prompt and the seed alone."""
        asked = body.get("prompt") or body["messages"][-1]["content"]
        has_drafts = body["speculative"].get("enabled", True)
        chance = random.Random(f"{body['seed']} {len(asked)}")
        story = STORY + " (Differs.)" if "differ" in asked and has_drafts else STORY
        words = story.replace(" ", "\0 ").split("\0")[1:]
        words = (words * 60)[: body["max_tokens"]]
        at = 0
        while at < len(words):
            k = 4 if has_drafts and not (self.killed[-1:] == ["draft"] and at % 60 < 30) else 0
            accepted = min(sum(1 for _ in iter(lambda: chance.random() < 0.68, False)), k, len(words) - at)
            texts = words[at : at + accepted + 1]
            draft = words[at : at + accepted] + [chance.choice(WRONG) for _ in range(k - accepted)]
            last = "plain" if not k else "bonus" if accepted == k else "recovered"
            if len(texts) == accepted:
                last = "accepted"
            at += len(texts)
            self.rounds, self.accepted = self.rounds + 1, self.accepted + accepted
            self.drafted, self.tokens = self.drafted + k, self.tokens + len(texts)
            rounds = [{"texts": texts, "accepted": accepted, "draft": draft, "parents": None, "last": last}]
            piece = {"delta": {"content": "".join(texts)}} if "chat" in path else {"text": "".join(texts)}
            reason = "length" if at >= len(words) else None
            yield {"choices": [{"index": 0, **piece, "rounds": rounds, "finish_reason": reason}]}

    async def stream(self, path: str, body: dict[str, Any], last: str | None) -> AsyncIterator[str]:
        """The events after the last one that the client has seen."""
        num_killed = len(self.killed)
        for number, event in enumerate(self.events(path, body)):
            if last is not None and number <= int(last):
                continue
            if number == self.cut_after:
                self.cut_after = None
                raise ConnectionError("cut on demand")
            if len(self.killed) > num_killed:
                num_killed = len(self.killed)
                await asyncio.sleep(self.pause_s)
            await asyncio.sleep(self.round_s)
            yield f"id: {number}\ndata: {json.dumps(event)}\n\n"
        yield "id: end\ndata: [DONE]\n\n"

    def metrics(self) -> str:
        label = 'phase="decode",replica="router#1"'
        rows = [
            f"paceline:rounds_total{{{label}}} {self.rounds}",
            f"paceline:round_seconds_total{{{label}}} {self.rounds * 0.0092}",
            f"paceline:draft_wait_seconds_total{{{label}}} {self.rounds * 0.0021}",
            f"paceline:target_compute_seconds_total{{{label}}} {self.rounds * 0.0061}",
            f'vllm:spec_decode_num_draft_tokens_total{{replica="router#1"}} {self.drafted}',
            f'vllm:spec_decode_num_accepted_tokens_total{{replica="router#1"}} {self.accepted}',
            f'vllm:generation_tokens_total{{replica="router#1"}} {self.tokens}',
            'vllm:num_requests_running{replica="router#1"} 1.0',
            'vllm:num_requests_waiting{replica="router#1"} 0.0',
            'paceline:requests_started_total{replica="ingress#1"} 1.0',
        ]
        return "\n".join(rows)


def make_app(fake: Fake) -> FastAPI:
    api = FastAPI()
    add_page(api, "demo")
    add_demo(api, fake.kill, has_keys=False)

    @api.middleware("http")
    async def guard(request: Request, answer: Any) -> Response:
        is_open = not request.url.path.startswith(("/v1", "/tokenize", "/demo"))
        if fake.key and not is_open and request.headers.get("authorization") != f"Bearer {fake.key}":
            return JSONResponse({"error": {"message": "no valid API key"}}, 401)
        response: Response = await answer(request)
        return response

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "paceline", "max_model_len": 2048}]}

    @api.post("/tokenize")
    async def tokenize() -> Response:
        return JSONResponse({}, 200 if fake.has_template else 400)

    @api.get("/health")
    async def health() -> dict[str, Any]:
        compiling = {"compiling": {"done": 1, "of": 6, "left_s": 40}} if fake.drafted == 8 else {}
        return {"routers": [{"replica": "router#1", "ready": True, "reason": None, **compiling}]}

    @api.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(fake.metrics())

    @api.post("/v1/completions")
    @api.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        body, last = await request.json(), request.headers.get("last-event-id")
        fake.requests.append((request.url.path, body, last))
        return StreamingResponse(fake.stream(request.url.path, body, last), media_type="text/event-stream")

    return api


@contextmanager
def serving_fake(fake: Fake) -> Iterator[str]:
    """Serve until the block ends; yields the address."""
    with start_blocking_portal() as portal, listening(portal, make_app(fake)) as url:
        yield url
