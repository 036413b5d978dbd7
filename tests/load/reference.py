"""Reference: every text is the target's own, says an audit in this process, or the text of another server."""

import asyncio
import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .client import Client, Clock
from .plan import Plan
from .records import Record
from .server import PATHS, LoadError, survey

ENGINE = "engine"
BUNDLED = "bundled"
_NUM_STREAMS = 8


def target_of(reference: str) -> str | None:
    """Return the target that `engine` or `engine:MODEL` names; None for a server's URL."""
    name, _, model = reference.partition(":")
    return model or BUNDLED if name == ENGINE else None


async def check(plan: Plan, records: Sequence[Record]) -> None:
    """Note how the texts of successful requests differ from the reference's.

    Raises LoadError if the reference cannot be reached, or cannot check a request.
    """
    reference, succeeded = plan.options.reference, [record for record in records if record.is_ok]
    assert reference is not None
    if model := target_of(reference):
        await asyncio.to_thread(_audit, model, succeeded)
        return
    texts = await _texts_of(reference, plan, {record.index for record in succeeded})
    for record in succeeded:
        record.difference = difference(record.text, texts[record.index])


def difference(actual: str, expected: str) -> str | None:
    if actual == expected:
        return None
    pairs = enumerate(zip(actual, expected, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(actual), len(expected)))
    return f"differs from character {at} on: {actual[at : at + 40]!r} instead of {expected[at : at + 40]!r}"


async def _texts_of(url: str, plan: Plan, indices: set[int]) -> dict[int, str]:
    """Ask a server for the texts, some at a time."""
    options = plan.options
    client = Client(url, PATHS[options.endpoint], api_key=options.api_key, timeout_s=options.timeout)
    try:
        server = await survey(client, options.endpoint, None)
        clock, room, texts = Clock(), asyncio.Semaphore(_NUM_STREAMS), dict[int, str]()

        async def ask(index: int) -> None:
            body = plan.reference_body(index, has_extensions=server.has_extensions) | {"model": server.model}
            async with room:
                record = await client.send(body, Record(index, "", 0.0, 0.0), clock)
            if not record.is_ok:
                raise LoadError(f"the reference {url} does not answer: {record.outcome}: {record.message}")
            texts[index] = record.text

        await asyncio.gather(*(ask(index) for index in indices))
        return texts
    finally:
        await client.close()


def _audit(model: str, records: Sequence[Record]) -> None:
    """Audit each different answer to a request once."""
    answers: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.kept is None:
            raise LoadError("the server sends no records of its answers to audit: name a server as --reference")
        answers[f"request {record.index}: {json.dumps(record.kept['choices'])}"].append(record)
    for name, words in audit(model, {name: same[0].kept or {} for name, same in answers.items()}).items():
        for record in answers[name]:
            record.difference = words


def audit(model: str, records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Audit records by a target in this process; return what differs, in words, by the name of the record.

    Raises LoadError if a record cannot be audited.
    """
    from deployments.diagnosis.audit_report import AuditReport
    from deployments.records.record import Record as Kept

    found, entries = {}, [Kept.model_validate(kept) for kept in records.values()]
    for name, entry, outcome in zip(records, entries, _auditor(model)(entries), strict=True):
        report = AuditReport(near=0.0)
        report.add(name, entry, outcome)
        for reason in report.reasons:
            raise LoadError(f"{name[:80]} cannot be audited: {reason}")
        for _, words in report.differing[:1]:
            found[name] = words.removeprefix(f"{name}, ")
    return found


@functools.cache
def _auditor(model: str) -> Any:
    """Load a target. It loads torch, which nothing else here needs."""
    from deployments.diagnosis.auditors import local_auditor

    return local_auditor({"target_model": model, "compile": "off"})
