"""Prove: asks a server for the same texts in every way, and compares every token with plain decoding.

The reference is each text alone, without a draft. Then batch, draft length, streaming and killed processes change.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import Any

from deployments.diagnosis.http_client import Client, ServerError
from deployments.diagnosis.replay import Entry, first_difference
from deployments.diagnosis.running import PATH

TEMPERATURES = (0.0, 0.7, 1.0)
BATCH = 8
_READY_S = 120
_PLAIN = {"enabled": False, "metrics": "summary"}


@dataclass(slots=True)
class Case:
    """A way of asking for all texts, and its outcome."""

    drafts: str
    speculative: dict[str, Any]
    num_at_once: int
    is_streamed: bool
    killed: str | None = None
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_cut: int = 0  # streams that ran when the process was killed
    seconds: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)


def cases(num_speculative_tokens: int, kills: Sequence[str], *, is_full: bool) -> Iterator[Case]:
    """Yield a case for each killed process, then the matrix: drafts x texts at once x streamed."""
    for process in kills:
        yield Case("server's", {}, BATCH, is_streamed=True, killed=process)
    k = num_speculative_tokens
    lengths = [n for n in range(1, k + 1) if is_full or n in (1, k)]
    fixed: dict[str, dict[str, Any]] = {f"always {n}": {"num_speculative_tokens": n, "fixed": True} for n in lengths}
    for name, speculative in {"off": _PLAIN, **fixed, "server's": {}}.items():
        for num_at_once in (1, BATCH):
            for is_streamed in (False, True):
                yield Case(name, speculative, num_at_once, is_streamed)


def prove(
    client: Client, texts: Sequence[str], kills: Sequence[str], *, is_full: bool
) -> tuple[dict[str, Any], list[Entry]]:
    """Ask for all texts in all ways; return the proof, and the entries for `replay`."""
    num_tokens = 128 if is_full or kills else 32  # a kill takes a moment
    common = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    pairs = [(text, temperature) for text in (texts if is_full else texts[:3]) for temperature in TEMPERATURES]
    requests = [common | {"prompt": text, "temperature": t, "seed": seed} for seed, (text, t) in enumerate(pairs)]
    prover = _Prover(client, requests, expected=[])
    if kills:
        try:
            client.post("/demo/kill", {})
        except ServerError as error:
            if error.status != 400:  # no process was named
                raise ServerError(f"no process can be killed: start the server with page=demo; {error}") from error
    try:
        prover.expected = [prover.ask(request | {"speculative": _PLAIN})[0] for request in requests]
        answer = prover.entries[0].answer
        k = answer["metrics"]["speculative_decoding"]["num_spec_tokens"]
    except KeyError as error:
        raise ServerError(f"{client.url} answers without {error}: is it Paceline?") from error
    finished = list(map(prover.run, cases(k, kills, is_full=is_full)))
    proof = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": client.url,
        "version": client.get("/version")["version"],
        "model": answer["model"],
        "system_fingerprint": answer["system_fingerprint"],
        "requests": [body | {"token_ids": ids} for body, ids in zip(requests, prover.expected, strict=True)],
        "cases": list(map(asdict, finished)),
        "problems": (problems := _problems(finished, prover.expected)),
        "all_equal": not problems and not any(case.differences for case in finished),
    }
    return proof, prover.entries


@dataclass(slots=True)
class _Prover:
    """Asks one server; `entries` holds the requests without a stream, and their answers."""

    client: Client
    requests: Sequence[dict[str, Any]]
    expected: list[list[int]]
    entries: list[Entry] = field(default_factory=list)

    def run(self, case: Case) -> Case:
        started, has_begun = time.monotonic(), Event()
        stream = {"stream": True, "stream_options": {"include_usage": True}} if case.is_streamed else {}
        body = {"speculative": case.speculative | {"metrics": "summary"}, **stream}
        with ThreadPoolExecutor(case.num_at_once) as threads:
            waiting = [threads.submit(self.ask, request | body, has_begun.set) for request in self.requests]
            if case.killed and has_begun.wait():
                self.client.post("/demo/kill", {"process": case.killed})
                case.num_cut = sum(not answer.done() for answer in waiting)
        for number, (answer, expected) in enumerate(zip(waiting, self.expected, strict=True)):
            error = answer.exception()
            actual, num_drafted = ([], 0) if error else answer.result()
            case.num_tokens += len(actual)
            case.num_draft_tokens += num_drafted
            if (at := first_difference(expected, actual)) is not None:
                tokens = {"expected": expected[at : at + 1], "actual": actual[at : at + 1]}
                case.differences.append({"request": number, "position": at, **tokens, "error": error and str(error)})
        case.seconds = round(time.monotonic() - started, 3)
        deadline = time.monotonic() + _READY_S
        while case.killed and not self.client.get("/health", 503)["ready"]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.client.url} is not ready {_READY_S} s after the {case.killed} was killed")
            time.sleep(0.2)
        return case

    def ask(self, body: dict[str, Any], begin: Callable[[], None] = lambda: None) -> tuple[list[int], int]:
        """Return an answer's tokens and how many were drafted; call `begin` when a stream has begun or failed."""
        if not body.get("stream"):
            answer = self.client.post(PATH, body)
            self.entries.append(Entry(path=PATH, body=body, answer=answer))
            return list(answer["choices"][0]["token_ids"]), _num_drafted(answer)
        token_ids: list[int] = []
        last: dict[str, Any] = {}
        try:
            for last in self.client.stream(PATH, body):
                token_ids += [token_id for choice in last["choices"] for token_id in choice["token_ids"]]
                begin()
        finally:
            begin()
        return token_ids, _num_drafted(last)


def _num_drafted(answer: dict[str, Any]) -> int:
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])


def _problems(finished: Sequence[Case], expected: Sequence[list[int]]) -> list[str]:
    """Return why equal texts would prove nothing."""
    problems = ["the server wrote no tokens"] if not all(expected) else []
    if not any(case.num_draft_tokens for case in finished):
        problems.append("the server made no drafts")
    for case in finished:
        if case.drafts.startswith("always") and not case.num_draft_tokens:
            problems.append(f"no drafts where there should be {case.drafts}")
        if case.killed and not case.num_cut:
            problems.append(f"no stream ran when the {case.killed} was killed")
    return list(dict.fromkeys(problems))


def page(proof: dict[str, Any]) -> str:
    """Return a proof as a page of Markdown."""
    differing: list[str] = []
    total = len(proof["requests"])
    title = "All texts are equal" if proof["all_equal"] else "; ".join(proof["problems"]) or "Some texts differ"
    lines = [
        f"# {title}\n",
        f"{proof['model']} at {proof['server']}, Paceline {proof['version']}, `{proof['system_fingerprint']}`, "
        f"{proof['made_at']}. Each row asks for the same {total} texts, at temperatures 0, 0.7 and 1 with fixed "
        "seeds. Every token is compared with plain decoding of one text at a time.\n",
        "| draft | at once | streamed | killed | equal | tokens | drafted | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in proof["cases"]:
        way = f"{case['drafts']} | {case['num_at_once']} | {case['is_streamed']} | {case['killed']}"
        equal = f"{total - len(case['differences'])} of {total}"
        lines.append(f"| {way} | {equal} | {case['num_tokens']} | {case['num_draft_tokens']} | {case['seconds']} |")
        differing += [f"- {way}: `{json.dumps(difference)}`" for difference in case["differences"]]
    return "\n".join([*lines, "", *differing[:20], ""])
