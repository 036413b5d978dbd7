"""Prove: asks a server for the same texts in every way, and has every different answer audited.

Batch, draft length, streaming and killed processes change; equal answers are audited once.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from threading import Event
from typing import Any

from deployments.diagnosis.auditors import ask_server
from deployments.diagnosis.http_client import Client, ServerError
from deployments.diagnosis.running import PATH
from deployments.records.record import Record

TEMPERATURES = (0.0, 0.7, 1.0)
BATCH = 8
_READY_S = 120
_PLAIN = {"enabled": False}
_REPORTS = {"metrics": "summary", "record": True}


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
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ask for all texts in all ways, and audit them; return the proof, and the records of the distinct answers."""
    num_tokens = 128 if is_full or kills else 32  # a kill takes a moment
    common = {"max_tokens": num_tokens, "ignore_eos": True}
    pairs = [(text, temperature) for text in (texts if is_full else texts[:3]) for temperature in TEMPERATURES]
    requests = [common | {"prompt": text, "temperature": t, "seed": seed} for seed, (text, t) in enumerate(pairs)]
    prover = _Prover(client, requests)
    if kills:
        try:
            client.post("/demo/kill", {})
        except ServerError as error:
            if error.status != 400:  # no process was named
                raise ServerError(f"no process can be killed: start the server with page=demo; {error}") from error
    try:
        answer = prover.ask(requests[0] | {"max_tokens": 1, "speculative": _PLAIN | _REPORTS})
        k = answer["metrics"]["speculative_decoding"]["num_spec_tokens"]
    except KeyError as error:
        raise ServerError(f"{client.url} answers without {error}: is it Paceline?") from error
    finished = list(map(prover.run, cases(k, kills, is_full=is_full)))
    problems = _problems(finished)
    proof = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": client.url,
        "version": client.get("/version")["version"],
        "model": answer["model"],
        "system_fingerprint": answer["system_fingerprint"],
        "requests": requests,
        "num_audited": len(prover.audits),
        "cases": list(map(asdict, finished)),
        "problems": problems,
        "all_equal": not problems and not any(case.differences for case in finished),
    }
    return proof, prover.records


@dataclass(slots=True)
class _Prover:
    """Asks one server, and audits each answer that it has not seen yet."""

    client: Client
    requests: Sequence[dict[str, Any]]
    records: list[dict[str, Any]] = field(default_factory=list)
    audits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What is wrong with each answer, by request and texts."""

    def run(self, case: Case) -> Case:
        started, has_begun = time.monotonic(), Event()
        stream = {"stream": True, "stream_options": {"include_usage": True}} if case.is_streamed else {}
        body = {"speculative": case.speculative | _REPORTS, **stream}
        with ThreadPoolExecutor(case.num_at_once) as threads:
            waiting = [threads.submit(self.ask, request | body, has_begun.set) for request in self.requests]
            if case.killed and has_begun.wait():
                self.client.post("/demo/kill", {"process": case.killed})
                case.num_cut = sum(not answer.done() for answer in waiting)
        case.seconds = round(time.monotonic() - started, 3)
        deadline = time.monotonic() + _READY_S
        while case.killed and not self.client.get("/health", 503)["ready"]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.client.url} is not ready {_READY_S} s after the {case.killed} was killed")
            time.sleep(0.2)
        for number, answer in enumerate(waiting):
            if error := answer.exception():
                case.differences.append({"request": number, "error": str(error)})
                continue
            record = answer.result()["record"]
            case.num_tokens += sum(len(choice["token_ids"]) for choice in record["choices"])
            case.num_draft_tokens += _num_drafted(answer.result())
            case.differences += [{"request": number, **wrong} for wrong in self._audit(number, record)]
        return case

    def _audit(self, number: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        key = json.dumps([number, record["choices"]])
        if key not in self.audits:
            self.records.append(record)
            found = ask_server(self.client, Record.model_validate(record))
            if isinstance(found, str):
                self.audits[key] = [{"error": found}]
            else:
                unequal = [choice.model_dump() for choice in found.choices if not choice.is_equal(near=0.0)]
                self.audits[key] = [choice | {"differences": choice["differences"][:1]} for choice in unequal]
        return self.audits[key]

    def ask(self, body: dict[str, Any], begin: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return an answer or a stream's last event; call `begin` when a stream has begun or failed."""
        if not body.get("stream"):
            answer: dict[str, Any] = self.client.post(PATH, body)
            return answer
        last: dict[str, Any] = {}
        try:
            for event in self.client.stream(PATH, body):
                last = event
                begin()
        finally:
            begin()
        return last


def _num_drafted(answer: dict[str, Any]) -> int:
    return int(answer["metrics"]["speculative_decoding"]["num_draft_tokens"])


def _problems(finished: Sequence[Case]) -> list[str]:
    """Return why equal texts would prove nothing."""
    problems = ["the server wrote no tokens"] if not all(case.num_tokens for case in finished) else []
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
        f"seeds. Every token was audited: {proof['num_audited']} different answers, in one parallel pass each.\n",
        "| draft | at once | streamed | killed | equal | tokens | drafted | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in proof["cases"]:
        way = f"{case['drafts']} | {case['num_at_once']} | {case['is_streamed']} | {case['killed']}"
        equal = f"{total - len({each['request'] for each in case['differences']})} of {total}"
        lines.append(f"| {way} | {equal} | {case['num_tokens']} | {case['num_draft_tokens']} | {case['seconds']} |")
        differing += [f"- {way}: `{json.dumps(difference)}`" for difference in case["differences"]]
    return "\n".join([*lines, "", *differing[:20], ""])
