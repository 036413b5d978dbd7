"""`python -m tests.load tools`: does a server keep calls and JSON whole, whatever it drafts and however it is asked?

Each conversation is sent in all variants: drafts on, off and of fixed length (where the server takes our field for it),
streamed and not. They have one seed, so that all answers should be equal, byte for byte.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from .client import Client, data_of_events
from .options import Options
from .server import PATHS, LoadError, survey
from .tool_cases import KINDS, Case, cases

FAULTS = ("failed", "invalid JSON", "schema", "name", "no call", "differs")
"""What is counted: no answer; arguments, or an answer, that are no JSON, or JSON that the schema refuses; a function
that was not offered or not chosen; no call where one is required; bytes other than those of the first variant."""
ARMS: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "on": {}, "fixed": {"fixed": True}}


@dataclass(slots=True)
class Message:
    """An answer without its ids, which differ between requests; `calls` are names and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Add a chunk's choice, or a whole one."""
        part = choice.get("delta") or choice.get("message") or {}
        self.content += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
        for position, call in enumerate(part.get("tool_calls") or ()):
            if call.get("index", position) == len(self.calls):
                self.calls.append(["", ""])
            function, known = call.get("function") or {}, self.calls[call.get("index", position)]
            known[0] += function.get("name") or ""
            known[1] += function.get("arguments") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def faults(case: Case, message: Message) -> list[str]:
    """Return what is wrong with an answer alone: words of `FAULTS`, each with what it found.

    What `max_tokens` cut is not judged; neither are the arguments of a voluntary call, unless its function is strict.
    """
    import jsonschema

    is_cut, found = message.finish_reason == "length", []
    texts = [("", message.content)] if "" in case.schemas else message.calls
    chosen = case.fields.get("tool_choice")
    if not texts and chosen != "auto" and not is_cut:
        found.append("no call")
    for name, text in texts[:-1] if is_cut else texts:
        if name not in case.schemas or (isinstance(chosen, dict) and name != chosen["function"]["name"]):
            found.append(f"name {name!r}")
            continue
        try:
            value = json.loads(text, parse_constant=_refuse)
            if case.kind != "auto":
                jsonschema.validate(value, case.schemas[name])
        except ValueError as error:
            found.append(f"invalid JSON: {error}: {text}")
        except jsonschema.ValidationError as error:
            found.append(f"schema: {error.message}: {text}")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


async def send(client: Client, body: dict[str, Any]) -> Message | str:
    """Return the answer to a request, or why there is none."""
    message = Message()
    try:
        async with client.http.stream("POST", PATHS["chat"], json=body) as response:
            if response.status_code != httpx.codes.OK:
                return f"failed: {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
            if not body.get("stream"):
                message.add(json.loads(await response.aread())["choices"][0])
                return message
            async for _, data, _ in data_of_events(response.aiter_bytes(), lambda: 0.0):
                if data == "[DONE]":
                    return message
                for choice in json.loads(data)["choices"]:
                    message.add(choice)
    except (httpx.TransportError, ValueError, LookupError) as error:
        return f"failed: {error!r}"
    return "failed: the stream ended without [DONE]"


@dataclass(slots=True)
class Suite:
    """The variants, and what was found; `counts` are by kind and column of the table."""

    client: Client
    model: str
    arms: dict[str, dict[str, Any]]
    found: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def ask(self, case: Case) -> None:
        """Send all variants of a conversation, one after the other, and compare them."""
        first: Message | None = None
        for arm, fields in self.arms.items():
            for is_streamed in (False, True):
                body = {"model": self.model, **case.fields, "stream": is_streamed}
                body |= {"speculative": fields} if fields else {}
                message = await send(self.client, body)
                if isinstance(message, str):
                    wrong = [message]
                else:
                    first, wrong = first or message, faults(case, message)
                    self.counts[case.kind, "calls"] += len(message.calls) or "" in case.schemas
                    self.counts[case.kind, "cut"] += message.finish_reason == "length"
                    wrong += [f"differs: {message} is not {first}"] if message != first else []
                self.counts[case.kind, "requests"] += 1
                self.counts.update((case.kind, next(filter(text.startswith, FAULTS))) for text in wrong)
                variant = f"{arm}, {'streamed' if is_streamed else 'whole'}"
                self.found += [{"case": case.index, "variant": variant, "found": text, "body": body} for text in wrong]

    def table(self) -> Table:
        """Return the counts by kind of request."""
        columns = ("requests", "calls", "cut", *FAULTS)
        table = Table("asked for", *columns, title=f"{self.model}: drafts {', '.join(self.arms)}; whole and streamed")
        for kind in KINDS:
            table.add_row(kind, *(str(self.counts[kind, column]) for column in columns))
        return table


def main(arguments: Sequence[str], console: Console) -> int:
    """Run the suite; returns 1 if anything was found.

    Raises LoadError if jsonschema is not installed, or the server cannot be reached.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {__package__} tools", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="conversations, each sent in all variants (1000)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer (256)")
    parser.add_argument("--out", type=Path, default=Path("tool-faults.jsonl"), help="what was found, with the requests")
    parser.add_argument("--concurrency", type=int, default=8, help="conversations at once (8)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address, without /v1")
    parser.add_argument("--model", default=None, help="a served model's name")
    parser.add_argument("--api-key-file", type=Path, default=None, help="a file with the key (else $OPENAI_API_KEY)")
    options = parser.parse_args(arguments)
    if find_spec("jsonschema") is None:
        raise LoadError("the tool-call suite judges arguments with jsonschema: pip install jsonschema")
    with console.status("sending conversations"):
        suite = asyncio.run(_run(options))
    console.print(suite.table())
    for fault in suite.found[:5]:
        console.print(f"{fault['case']} ({fault['variant']}): {fault['found'][:600]}", style="red", markup=False)
    if suite.found:
        options.out.write_text("".join(f"{json.dumps(fault, ensure_ascii=False)}\n" for fault in suite.found))
        console.print(f"{len(suite.found)} faults, with their requests: {options.out}", markup=False)
    return 1 if suite.found else 0


async def _run(options: argparse.Namespace) -> Suite:
    client = Client(options.url, PATHS["chat"], api_key=Options(api_key_file=options.api_key_file).api_key)
    try:
        server = await survey(client, "chat", options.model)
        suite = Suite(client, server.model, ARMS if server.has_extensions else {"default": {}})
        probe = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        if server.has_extensions and isinstance(await send(client, {**probe, "speculative": ARMS["fixed"]}), str):
            suite.arms = {arm: fields for arm, fields in ARMS.items() if arm != "fixed"}
        length, users = server.max_model_len, asyncio.Semaphore(options.concurrency)
        max_bytes = None if length is None else length - 2 * options.max_tokens

        async def ask(case: Case) -> None:
            async with users:
                await suite.ask(case)

        await asyncio.gather(*map(ask, cases(options.calls, max_tokens=options.max_tokens, max_bytes=max_bytes)))
        return suite
    finally:
        await client.close()
