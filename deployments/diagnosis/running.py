"""Checks of a running server: health, the speed-up of its drafts, their use and acceptance, recoveries and queue."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

from deployments.diagnosis.finding import Finding, judged
from deployments.diagnosis.http_client import Client, Metrics, ServerError
from deployments.diagnosis.trial import NUM_TOKENS, TEMPERATURE, Figures, speed_finding, take_turns
from deployments.ingress.server_info import installed_version
from engine.control.judge import PROBLEMS, WHY_PLAIN

PATH = "/v1/completions"
_ROUNDS = ("paceline:rounds_by_draft_length_total", "num_draft_tokens", "reason")
_MANY_FALLBACKS = 0.05
_SLOW_PASS_S = 0.05
_SLOW_WEIGHTS_PER_S = 1.5e9
"""Of a pass: its calls, and its weights. Two cores take a third of it, eager passes included."""


def server_findings(client: Client) -> Iterator[Finding]:
    """Check a server by what it does, which takes seconds, and by what it says."""
    try:
        health, server = client.get("/health", 503), client.get("/version")
        routers = ", ".join(f"{one['replica']} {one['reason'] or 'is ready'}" for one in health["routers"])
        if not health["ready"]:
            yield Finding("error", "health", f"{health['reason']}; {routers}", "wait, then read the server's log")
            return
        yield Finding("ok", "health", routers)
        version, here = server["version"], installed_version()
        yield judged("version", version, "" if version == here else f"this command is version {here}: use the server's")
        rounds: defaultdict[tuple[str, ...], float] = defaultdict(float)
        plain, drafted = take_turns(lambda *request: _decode(client, rounds, *request))
        left_s = max((one["compiling"]["left_s"] for one in health["routers"] if "compiling" in one), default=0)
        if (num_parameters := server["num_parameters"]) is not None:  # this Ingress has heard of the models
            yield _pace_finding(plain, num_parameters, left_s)
        yield speed_finding("speed-up", plain, drafted)
        metrics = client.metrics()
        yield from _draft_findings(rounds, metrics)
        recoveries, waiting = map(metrics.total, ("paceline:target_recoveries_total", "vllm:num_requests_waiting"))
        yield judged("recoveries", f"{recoveries:.0f}", "the Router's log says why" * bool(recoveries))
        yield judged("queue", f"{waiting:.0f}", "raise autoscaling.max_replicas" * bool(waiting))
    except (ServerError, ValueError, KeyError, ZeroDivisionError) as error:
        yield Finding("error", "server", f"{client.url}: {error!r}", "check --url: is it Paceline? Read its log")


def _pace_finding(plain: Figures, num_parameters: int, left_s: int) -> Finding:
    """Compare the tokens per second of one stream without drafts with what even a slow processor reaches."""
    speed, least = plain.num_tokens / plain.seconds, 1 / (_SLOW_PASS_S + num_parameters / _SLOW_WEIGHTS_PER_S)
    found = f"{speed:.0f} tokens/s without drafts"
    if left_s:
        return Finding("warning", "pace", f"{found}, by eager passes", f"measure once it is compiled, in {left_s} s")
    advice = f"{num_parameters / 1e6:.0f} M weights allow {least:.0f}: read the log, and stop what else uses the cores"
    return judged("pace", found, advice * (speed < least))


def _draft_findings(rounds: Mapping[tuple[str, ...], float], metrics: Metrics) -> Iterator[Finding]:
    """Tell how many of these rounds, by length and reason, had drafts, and what the server says of its drafts."""
    plain = {reason: count for (length, reason), count in rounds.items() if length == "0"}
    total, problems = sum(rounds.values()), metrics.by("paceline:draft_problem", "problem")
    advice = [PROBLEMS[name] for (name,), is_so in problems.items() if is_so]
    if 2 * sum(plain.values()) > total:
        advice.append(WHY_PLAIN[max(plain, key=lambda reason: plain[reason])])
    used = 1 - sum(plain.values()) / total
    yield judged("drafts", f"in {used:.0%} of {total:.0f} rounds", "; ".join(advice))
    fallbacks = metrics.by("paceline:drafter_fallbacks_total", "reason")
    if sum(fallbacks.values()) > _MANY_FALLBACKS * total:
        reasons = ", ".join(f"{count:.0f} {reason}" for (reason,), count in fallbacks.items() if count)
        yield Finding("warning", "draft worker", f"rounds without its answer: {reasons}", "read its log")
    if num_drafts := metrics.total("vllm:spec_decode_num_drafts_total"):
        accepted = metrics.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
        rates = [f"{accepted[key] / num_drafts:.0%}" for key in sorted(accepted, key=lambda key: int(key[0]))]
        yield Finding("ok", "acceptance", f"by position {', '.join(rates) or 'none'}")
    if swaps := metrics.by("paceline:draft_learning_swaps_total", "outcome"):
        counts = ", ".join(f"{count:.0f} {outcome}" for (outcome,), count in swaps.items())
        added = metrics.by("paceline:draft_learning_accepted_tokens", "weights")
        num_tokens = metrics.total("paceline:draft_learning_tokens_total")
        learned = f"{num_tokens:,.0f} tokens learned, swaps: {counts}"
        if loaded := added.get(("loaded",)):  # sums over workers
            learned += f"; drafts of held-out texts add {added['learned',] / loaded - 1:+.0%} tokens"
        yield Finding("ok", "draft learning", learned)


def _decode(
    client: Client, rounds: defaultdict[tuple[str, ...], float], text: str, seed: int, has_draft: bool
) -> Figures:
    """Return the figures of one stream, with drafts as the server chooses, whose `rounds` are added, or without."""
    body = {"prompt": text, "max_tokens": NUM_TOKENS, "temperature": TEMPERATURE, "seed": seed, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "speculative": {} if has_draft else {"enabled": False}}
    before = client.metrics()
    arrivals = [(time.perf_counter(), event["choices"][0]["token_ids"]) for event in client.stream(PATH, body)]
    after, latency = client.metrics(), "vllm:inter_token_latency_seconds"
    for key, count in after.by(*_ROUNDS).items() if has_draft else ():
        rounds[key] += count - before.by(*_ROUNDS).get(key, 0.0)
    names = (f"{latency}_count", f"{latency}_sum", "vllm:spec_decode_num_accepted_tokens_total")
    num_tokens = sum(len(ids) for _, ids in arrivals[1:])  # the first arrival takes the time of the prompt, too
    counts = (after.total(name) - before.total(name) for name in names)
    return Figures(num_tokens, arrivals[-1][0] - arrivals[0][0], *counts)
