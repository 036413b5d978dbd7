"""Prove: asks a server the same in every way, and signs which texts were those of plain decoding.

The reference is each text alone, without a draft. Then batch, draft length, streaming and killed processes change, and
every token is compared. Who has the signer's public key can tell that a proof is the signer's, and was not changed.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

import click
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from deployments.diagnosis.client import Client, ServerError
from deployments.diagnosis.replay import Entry, first_difference
from deployments.diagnosis.running import PATH

KEY_FILE = Path(".config/paceline/prove.key")
"""The signer's key, in the home directory; made when it is first needed."""
TEMPERATURES = (0.0, 0.7, 1.0)
BATCH = 8
_READY_S = 120
_PLAIN = {"enabled": False}


@dataclass(slots=True)
class Case:
    """One way of asking for all texts, and what came of it."""

    drafts: str
    speculative: dict[str, Any]
    num_at_once: int
    is_streamed: bool
    killed: str | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)


def cases(num_speculative_tokens: int, kills: Sequence[str], *, is_full: bool) -> Iterator[Case]:
    """Yield the matrix: drafts x texts at once x streamed; then a case for each killed process."""
    k = num_speculative_tokens
    lengths = range(1, k + 1) if is_full else sorted({1, k} - {0})
    drafts = {"off": _PLAIN, **{str(n): {"num_speculative_tokens": n, "fixed": True} for n in lengths}, "server's": {}}
    for name, speculative in drafts.items():
        for num_at_once in (1, BATCH):
            for is_streamed in (False, True):
                yield Case(name, speculative, num_at_once, is_streamed)
    for process in kills:
        yield Case("server's", {}, BATCH, is_streamed=True, killed=process)


def make_requests(texts: Sequence[str], num_tokens: int) -> list[dict[str, Any]]:
    """Return a request for each text and temperature, each with a seed of its own."""
    common = {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    pairs = [(text, temperature) for text in texts for temperature in TEMPERATURES]
    return [common | {"prompt": text, "temperature": t, "seed": seed} for seed, (text, t) in enumerate(pairs)]


class Prover:
    """Asks one server. `entries` holds the requests that were not streamed, with their answers, for `replay`."""

    def __init__(self, client: Client, requests: Sequence[dict[str, Any]]) -> None:
        self._client, self._requests = client, requests
        self.entries: list[Entry] = []
        self._expected: list[list[int]] = []

    def check_kills(self) -> None:
        """Raise ServerError unless the server lets its processes be killed."""
        try:
            self._client.post("/demo/kill", {})
        except ServerError as error:
            if error.status in (404, 405):
                message = f"{self._client.url} refuses kills ({error.status}): start it with page=demo"
                raise ServerError(message) from error

    def num_speculative_tokens(self) -> int:
        """Return the longest draft that the server allows."""
        answer = self._client.post(PATH, {"prompt": "a", "max_tokens": 1, "speculative": {"metrics": "summary"}})
        return int(answer["metrics"]["speculative_decoding"]["num_spec_tokens"])

    def reference(self) -> list[Entry]:
        """Ask for each text alone and without a draft; the others are compared with these."""
        self._expected = [self._ask(request | {"speculative": _PLAIN}) for request in self._requests]
        return self.entries.copy()

    def run(self, case: Case) -> None:
        """Ask for all texts in one way, and fill the case in."""
        started, has_begun = time.monotonic(), Event()
        body = {"speculative": case.speculative} | ({"stream": True} if case.is_streamed else {})
        with ThreadPoolExecutor(case.num_at_once) as threads:
            waiting = [threads.submit(self._ask, request | body, has_begun.set) for request in self._requests]
            if case.killed and has_begun.wait(_READY_S):
                self._client.post("/demo/kill", {"process": case.killed})
        for number, answer in enumerate(waiting):
            try:
                actual, message = answer.result(), None
            except ServerError as error:
                actual, message = [], str(error)
            case.num_tokens += len(actual)
            expected = self._expected[number]
            if (position := first_difference(expected, actual)) is not None:
                case.differences.append(
                    {
                        "request": number,
                        "position": position,
                        "expected": expected[position : position + 1],
                        "actual": actual[position : position + 1],
                        "error": message,
                    }
                )
        case.seconds = round(time.monotonic() - started, 3)
        if case.killed:
            self._wait_until_ready()

    def proof(self, reference: Sequence[Entry], finished: Sequence[Case]) -> dict[str, Any]:
        """Return what is signed: the server, the requests with their tokens, and the cases."""
        answer = reference[0].answer
        return {
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "server": self._client.url,
            "version": json.loads(self._client.get("/version"))["version"],
            "model": answer["model"],
            "system_fingerprint": answer["system_fingerprint"],
            "requests": [entry.body | {"token_ids": entry.answer["choices"][0]["token_ids"]} for entry in reference],
            "cases": list(map(asdict, finished)),
            "all_equal": not any(case.differences for case in finished),
        }

    def _ask(self, body: dict[str, Any], begin: Callable[[], None] = lambda: None) -> list[int]:
        if not body.get("stream"):
            answer = self._client.post(PATH, body)
            self.entries.append(Entry(PATH, body, answer))
            return list(answer["choices"][0]["token_ids"])
        token_ids: list[int] = []
        try:
            for event in self._client.stream(PATH, body):
                token_ids += [token_id for choice in event["choices"] for token_id in choice["token_ids"]]
                begin()
        finally:
            begin()  # also of a stream that fails before its first token
        return token_ids

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while not json.loads(self._client.get("/health"))["ready"]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self._client.url} is not ready {_READY_S} s after a kill")
            time.sleep(0.2)


def sign(proof: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return a proof with its Ed25519 signature and the public key; make the key on first use."""
    file = home / KEY_FILE
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(Ed25519PrivateKey.generate().private_bytes_raw())
    key = Ed25519PrivateKey.from_private_bytes(file.read_bytes())
    return {
        "proof": proof,
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(_signed_bytes(proof)).hex(),
    }


def verify(signed: dict[str, Any]) -> None:
    """Raise ClickException unless the signature is that of the public key in the file."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed["public_key"]))
        key.verify(bytes.fromhex(signed["signature"]), _signed_bytes(signed["proof"]))
    except (InvalidSignature, KeyError, TypeError, ValueError) as error:
        raise click.ClickException(f"the signature does not fit the proof: {error!r}") from error


def _signed_bytes(proof: dict[str, Any]) -> bytes:
    return json.dumps(proof, sort_keys=True, separators=(",", ":")).encode()


def page(signed: dict[str, Any]) -> str:
    """Return a proof as a page of Markdown."""
    proof = signed["proof"]
    number = len(proof["requests"])
    lines = [
        f"# {'All texts are equal' if proof['all_equal'] else 'Some texts differ'}",
        f"\n{proof['model']} at {proof['server']}, Paceline {proof['version']}, `{proof['system_fingerprint']}`, "
        f"{proof['made_at']}. Each row asks for the same {number} texts, at temperatures 0, 0.7 and 1 with fixed "
        "seeds; every token is compared with plain decoding, one text at a time.\n",
        "| draft tokens | at once | streamed | killed | equal | tokens | seconds |\n|---|---|---|---|---|---|---|",
    ]
    differing = []
    for case in proof["cases"]:
        equal = f"{number - len(case['differences'])} of {number}"
        cells = (case["drafts"], case["num_at_once"], "yes" if case["is_streamed"] else "no", case["killed"] or "-")
        lines.append(f"| {' | '.join(map(str, (*cells, equal, case['num_tokens'], case['seconds'])))} |")
        differing += [f"- `{' '.join(map(str, cells))}`: {json.dumps(one)}" for one in case["differences"]]
    lines += [
        "",
        *differing[:20],
        f"\nSigned by `{signed['public_key']}`; `paceline prove --check proof.json` verifies it.",
    ]
    return "\n".join(lines) + "\n"
