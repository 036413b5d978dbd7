"""Reference: every text is compared with the one that the target writes without drafts."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .client import Client, Clock
from .plan import Plan
from .records import Record
from .server import PATHS, LoadError, survey

ENGINE = "engine"
_NUM_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A text that is not the reference's, from the first character that differs."""

    index: int
    arm: str
    turn: int
    position: int
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"request {self.index} (arm {self.arm}, turn {self.turn}) differs from character {self.position} on: "
            f"{self.actual[:40]!r} instead of {self.expected[:40]!r}"
        )


def differences(records: Sequence[Record], texts: Mapping[int, str]) -> list[Difference]:
    """Return the successful requests whose text is not the reference's text for the same number."""
    differing = []
    for record in records:
        expected = texts[record.index] if record.is_ok else record.text
        if record.text != expected:
            pairs = enumerate(zip(record.text, expected, strict=False))
            shorter = min(len(record.text), len(expected))
            position = next((i for i, (actual, other) in pairs if actual != other), shorter)
            pieces = expected[position:], record.text[position:]
            differing.append(Difference(record.index, record.arm, record.turn, position, *pieces))
    return differing


async def reference_texts(plan: Plan, records: Sequence[Record]) -> dict[int, str]:
    """Return the reference's text for each request that succeeded, by its number.

    Raises LoadError if the reference cannot be reached, or does not answer a request.
    """
    reference = plan.options.reference
    assert reference is not None
    needed = {record.index: record for record in records if record.is_ok}
    if reference == ENGINE or reference.startswith(f"{ENGINE}:"):
        requests = [(record, plan.reference_body(index, has_extensions=True)) for index, record in needed.items()]
        return await asyncio.to_thread(_from_engine, reference.partition(":")[2], requests)
    return await _from_server(reference, plan, needed)


async def _from_server(url: str, plan: Plan, indices: Iterable[int]) -> dict[int, str]:
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


def _from_engine(model: str, requests: Sequence[tuple[Record, Mapping[str, Any]]]) -> dict[int, str]:
    from engine import LLM, SamplingParams  # loads torch, which nothing else here needs
    from engine.config import BUNDLED

    llm = LLM(target_model=model or BUNDLED, drafting="none")
    # A chat's template was applied by the server, which returned the token ids.
    prompts: list[Any] = [record.prompt_token_ids or str(body["prompt"]) for record, body in requests]
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    params = [SamplingParams(**{name: body[name] for name in names if name in body}) for _, body in requests]
    results = llm.generate(prompts, params, show_progress=False)
    return {record.index: result.outputs[0].text for (record, _), result in zip(requests, results, strict=True)}
