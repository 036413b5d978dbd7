"""Checks of a running server: health, use and acceptance of drafts, recoveries, queue, and the speed-up of drafts."""

import json
import time
from collections.abc import Iterator
from typing import Any

from deployments.diagnosis.client import Client, Metrics, ServerError
from deployments.diagnosis.finding import Finding
from deployments.diagnosis.trial import NUM_TOKENS, TEMPERATURE, Figures, speed_finding, take_turns
from deployments.ingress.server_info import installed_version

PATH = "/v1/completions"
_PLAIN_REASONS = {
    "off": ("speculation is off, or there is no draft", "serve with a draft_model and speculation=adaptive"),
    "goodput": (
        "adaptive speculation measured that drafts do not pay",
        "try a smaller draft, or fewer requests at once",
    ),
    "request": ("requests switched them off", "leave `speculative` out of requests"),
}
"""Why most rounds have no draft, and what to do, by the reason that /metrics gives for their length."""
_FALLBACK_SHARE = 0.05
_LOW_ACCEPTANCE = 0.3


def server_findings(client: Client) -> Iterator[Finding]:
    """Check a server by what it says, then by what it does; the last takes seconds."""
    try:
        yield _health(json.loads(client.get("/health")))
        version, here = json.loads(client.get("/version"))["version"], installed_version()
        advice = "" if version == here else f"this command is version {here}; use the server's"
        yield Finding("warning" if advice else "ok", "version", version, advice)
        metrics = client.metrics()
        yield from _drafts(metrics)
        yield _count(metrics, "recoveries", "paceline:target_recoveries_total", "see why in the Router's log")
        yield _count(metrics, "queue", "vllm:num_requests_waiting", "raise autoscaling.max_replicas, or wait")
        yield _count(
            metrics, "preemptions", "vllm:num_preemptions_total", "raise memory_fraction or lower max_num_seqs"
        )
        yield _speed(client)
    except (ServerError, ValueError, KeyError) as error:
        yield Finding("error", "server", str(error), "check --url and the server's log; is it Paceline?")


def _health(health: dict[str, Any]) -> Finding:
    routers = ", ".join(f"{one['replica']}: {one['reason'] or 'ready'}" for one in health["routers"])
    if not health["ready"]:
        return Finding("error", "health", f"{health['reason']} ({routers})", "wait, then see the server's log")
    is_partial = not all(one["ready"] for one in health["routers"])
    return Finding("warning" if is_partial else "ok", "health", routers, "see the log of that Router" * is_partial)


def _drafts(metrics: Metrics) -> Iterator[Finding]:
    """Tell whether drafts are used, why not, and which positions are accepted."""
    rounds = metrics.by("paceline:rounds_by_draft_length_total", "num_draft_tokens", "reason")
    total, plain = sum(rounds.values()), {why: n for (length, why), n in rounds.items() if length == "0"}
    if not total:
        yield Finding("ok", "drafts", "no rounds yet")
        return
    share = 1 - sum(plain.values()) / total
    if share < 0.5:
        reason = max(plain, key=lambda why: plain[why])
        why, advice = _PLAIN_REASONS.get(reason, (reason, "see paceline:rounds_by_draft_length"))
        yield Finding("warning", "drafts", f"in {share:.0%} of {total:.0f} rounds, because {why}", advice)
    else:
        yield Finding("ok", "drafts", f"in {share:.0%} of {total:.0f} rounds")
    fallbacks = metrics.by("paceline:drafter_fallbacks_total", "reason")
    if sum(fallbacks.values()) > _FALLBACK_SHARE * total:
        reasons = ", ".join(f"{count:.0f} {reason}" for (reason,), count in fallbacks.items() if count)
        yield Finding("warning", "draft worker", f"no answer in {reasons} rounds", "see the draft worker's log")
    if num_drafts := metrics.total("vllm:spec_decode_num_drafts_total"):
        accepted = metrics.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
        rates = [accepted[key] / num_drafts for key in sorted(accepted, key=lambda key: int(key[0]))]
        found = f"{', '.join(f'{rate:.0%}' for rate in rates)} by position, {1 + sum(rates):.2f} tokens a draft"
        is_low = not rates or rates[0] < _LOW_ACCEPTANCE
        advice = "draft and target rarely agree: take a draft of the target's family and training" * is_low
        yield Finding("warning" if is_low else "ok", "acceptance", found, advice)


def _count(metrics: Metrics, subject: str, name: str, advice: str) -> Finding:
    count = metrics.total(name)
    return Finding("warning" if count else "ok", subject, f"{count:.0f}", advice if count else "")


def _speed(client: Client) -> Finding:
    """Measure streams of this client, one at a time, with drafts as the server chooses and without."""

    def now(num_tokens: int, seconds: float) -> Figures:
        metrics, rounds = client.metrics(), "vllm:inter_token_latency_seconds"
        accepted = metrics.total("vllm:spec_decode_num_accepted_tokens_total")
        return Figures(num_tokens, seconds, metrics.total(f"{rounds}_count"), metrics.total(f"{rounds}_sum"), accepted)

    def decode(text: str, seed: int, has_draft: bool) -> Figures:
        body = {
            "prompt": text,
            "max_tokens": NUM_TOKENS,
            "temperature": TEMPERATURE,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "speculative": {} if has_draft else {"enabled": False},
        }
        before, arrivals = now(0, 0.0), []
        for event in client.stream(PATH, body):
            arrivals += [(time.perf_counter(), len(one["token_ids"] or ())) for one in event["choices"]]
        num_tokens = sum(number for _, number in arrivals[1:])  # the first brings the time of the prompt
        return now(num_tokens, arrivals[-1][0] - arrivals[0][0]).since(before)

    plain, drafted = take_turns(decode)
    if not (plain.num_rounds and drafted.num_rounds):
        return Finding(
            "warning", "speed-up", "/metrics counts no rounds", "is the server Paceline, and its only Ingress?"
        )
    return speed_finding("speed-up", plain, drafted)
