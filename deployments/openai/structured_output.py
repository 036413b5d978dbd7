"""Formats: from what a client says its text must match to a grammar that is known to compile."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from deployments.config import Limits
from deployments.grammar_check.checker import Trial
from deployments.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from deployments.openai.tools import ToolChoice, ToolForm
from engine.errors import RequestError
from engine.sampling.grammar import Grammars, from_choice, from_json_schema, from_regex, from_text


class Formats:
    """What one Ingress does with formats, on a thread of its own."""

    def __init__(self, grammars: Grammars, limits: Limits, tool_form: ToolForm | None) -> None:
        self._tool_form = tool_form
        self._max_chars = limits.max_grammar_chars
        self._trial = Trial(grammars, timeout_s=limits.grammar_timeout_s)
        self._thread = ThreadPoolExecutor(1, "formats")

    async def grammar(self, request: CompletionRequest | ChatCompletionRequest) -> str | None:
        """Return the grammar that a request's text must match, if it names one.

        Raises:
            RequestError: naming the field, and what is wrong with it or how much more than the limit it is.
        """
        forced = self._forced_call(request) if isinstance(request, ChatCompletionRequest) else None
        wanted = _wanted(request)
        if forced is not None and wanted is not None:
            raise RequestError(f"tool_choice requires a call, which {wanted[0]} does not allow", "tool_choice")
        wanted = wanted or forced
        if wanted is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, *wanted)

    def _forced_call(self, request: ChatCompletionRequest) -> tuple[str, Any, Callable[[Any], str]] | None:
        choice, tools = request.tool_choice, request.forced_tools
        if choice in (None, "none"):
            return None
        if request.tools is None:
            raise RequestError("tool_choice is only allowed with tools", "tool_choice")
        if isinstance(choice, ToolChoice) and not tools:
            raise RequestError(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
        if not tools or self._tool_form is None:
            return None
        is_parallel = choice == "required" and request.parallel_tool_calls is not False
        make = partial(self._tool_form.grammar, tools, parallel=is_parallel)
        return "tools", [tool.model_dump() for tool in tools], lambda _: make()

    def _compile(self, field: str, source: Any, make: Callable[[Any], str]) -> str:
        num_chars = len(source if isinstance(source, str) else json.dumps(source))
        if num_chars > self._max_chars:
            raise RequestError(f"{field} has {num_chars:,} characters, at most {self._max_chars:,} are allowed", field)
        try:
            grammar = make(source)
        except RequestError as error:
            raise RequestError(f"{field}: {error}", field) from None
        self._trial.check(grammar, field)
        return grammar


def _wanted(request: CompletionRequest | ChatCompletionRequest) -> tuple[str, Any, Callable[[Any], str]] | None:
    """Return the field that says what the text must match, its value, and what makes a grammar of that."""
    outputs = request.structured_outputs
    if isinstance(request, ChatCompletionRequest):
        match request.response_format:
            case JsonObjectFormat():
                found = ("response_format", {"type": "object"}, from_json_schema)
            case JsonSchemaFormat(json_schema=schema):
                found = ("response_format.json_schema.schema", schema.schema_, from_json_schema)
            case _:
                return None if outputs is None else _structured(outputs)
        if outputs is not None:
            raise RequestError("structured_outputs is not allowed with a response_format", "structured_outputs")
        return found
    return None if outputs is None else _structured(outputs)


def _structured(outputs: StructuredOutputs) -> tuple[str, Any, Callable[[Any], str]]:
    makers: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "json": (outputs.json_, _from_schema),
        "regex": (outputs.regex, from_regex),
        "choice": (outputs.choice, from_choice),
        "grammar": (outputs.grammar, from_text),
    }
    given = [name for name, (source, _) in makers.items() if source is not None]
    if len(given) != 1:
        names = ", ".join(given) or "none"
        raise RequestError(
            f"structured_outputs has {names}; exactly one of {', '.join(makers)} is allowed", "structured_outputs"
        )
    return (f"structured_outputs.{given[0]}", *makers[given[0]])


def _from_schema(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema is an object")
    return from_json_schema(schema)
