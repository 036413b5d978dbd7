"""Server: what is at the other end, and what it understands beyond OpenAI's API."""

from dataclasses import dataclass
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deployments.diagnosis.http_client import Metrics

from .client import Client
from .records import Acceptance

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROBE_TIMEOUT_S = 60.0


class LoadError(Exception):
    """The load test cannot be run as it was described."""


@dataclass(frozen=True, slots=True)
class Server:
    """A served model.

    Attributes:
        max_model_len: None if the server does not say.
        has_extensions: whether it takes `ignore_eos`, `continuous_usage_stats`, `cache_salt` and `speculative`.
        version: what `/version` answers, if anything.
        compiles_for_s: for how much longer it compiles its passes, by its estimate; 0 if it does not.
    """

    model: str
    max_model_len: int | None
    has_extensions: bool
    version: dict[str, Any]
    compiles_for_s: int = 0


def prompt_fields(endpoint: Endpoint, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a body that hold the prompt.

    Raises LoadError if messages cannot be sent to `/v1/completions`.
    """
    if endpoint == "chat":
        return {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else content}
    if not isinstance(content, str):
        raise LoadError("a prompt consists of messages; such prompts need --endpoint chat")
    return {"prompt": content}


def extension_fields(cache_salt: str) -> dict[str, Any]:
    """Return what is asked of a server that has extensions: tokens counted by chunk; acceptance, and a record to audit.

    Args:
        cache_salt: requests with another one share no cached prompts with these.
    """
    return {
        "cache_salt": cache_salt,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "speculative": {"metrics": "summary", "record": True},
    }


async def survey(client: Client, endpoint: Endpoint, model: str | None) -> Server:
    """Ask the server what it serves, and try a request with our extensions, then one without.

    Raises LoadError if it cannot be reached, or refuses both.
    """
    card = await _model_card(client, model)
    plain = {"model": card["id"], "max_tokens": 1, **prompt_fields(endpoint, "Hello")}
    extended = {**plain, "ignore_eos": True, "stream": True, **extension_fields("survey")}
    answers = [await _request(client, "POST", PATHS[endpoint], extended)]
    if answers[0].status_code in (400, 422):
        answers.append(await _request(client, "POST", PATHS[endpoint], plain))
    _check(answers[-1], client)
    version, health = [await client.http.get(path, timeout=_PROBE_TIMEOUT_S) for path in ("/version", "/health")]
    routers = health.json().get("routers", []) if health.text.startswith("{") else []  # others answer with nothing
    return Server(
        model=card["id"],
        max_model_len=card.get("max_model_len"),
        has_extensions=len(answers) == 1,
        version=version.json() if version.status_code == httpx.codes.OK else {},
        compiles_for_s=max((router["compiling"]["left_s"] for router in routers if "compiling" in router), default=0),
    )


async def count_prompt_tokens(client: Client, server: Server, endpoint: Endpoint, text: str) -> int:
    """Return how many tokens the server counts in a prompt. Raises LoadError if it refuses the prompt."""
    body = {"model": server.model, "max_tokens": 1, **prompt_fields(endpoint, text)}
    answer = await _request(client, "POST", PATHS[endpoint], body)
    _check(answer, client)
    count: int = answer.json()["usage"]["prompt_tokens"]
    return count


@dataclass(frozen=True, slots=True)
class Counters:
    """The speculation counters of `/metrics` at one moment.

    Attributes:
        acceptance: under vLLM's names.
        rounds: Paceline's rounds by the reason for their draft length: `fixed`, `off`, `goodput` or `trial`.
    """

    acceptance: Acceptance
    rounds: dict[str, float]

    def since(self, before: "Counters") -> "Counters":
        rounds = {reason: count - before.rounds.get(reason, 0.0) for reason, count in self.rounds.items()}
        return Counters(self.acceptance - before.acceptance, {reason: n for reason, n in rounds.items() if n})


async def read_counters(client: Client) -> Counters | None:
    """Return the counters, or None if the server has no `/metrics`, has no drafts in it, or is gone."""
    try:
        answer = await client.http.get("/metrics", timeout=_PROBE_TIMEOUT_S)
    except httpx.TransportError:  # the requests say so too
        return None
    if answer.status_code != httpx.codes.OK:
        return None
    metrics = Metrics(sample for family in text_string_to_metric_families(answer.text) for sample in family.samples)
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    if not all(metrics.by(name) for name in names):
        return None
    rounds = metrics.by("paceline:rounds_by_draft_length_total", "reason")
    return Counters(
        Acceptance(*(int(metrics.total(name)) for name in names)),
        {reason: count for (reason,), count in rounds.items()},
    )


async def _model_card(client: Client, model: str | None) -> dict[str, Any]:
    answer = await _request(client, "GET", "/v1/models")
    _check(answer, client)
    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in answer.json()["data"]}
    if model is None:
        return next(iter(cards.values()))
    if model not in cards:
        raise LoadError(f"{client.url} serves {', '.join(cards)}, and not {model}")
    return cards[model]


async def _request(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    try:
        return await client.http.request(method, path, json=body, timeout=_PROBE_TIMEOUT_S)
    except httpx.TransportError as error:
        raise LoadError(f"{client.url} cannot be reached: {error!r}") from error


def _check(answer: httpx.Response, client: Client) -> None:
    if answer.status_code != httpx.codes.OK:
        raise LoadError(f"{client.url} answers {answer.url.path} with {answer.status_code}: {answer.text[:300]}")
