"""GrammarCompiler: from a client's schema, expression or choices to a grammar that is known to compile."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from deployments.config import Limits
from deployments.grammar_check.checker import GrammarChecker
from deployments.openai.structured_output import GrammarSource
from engine.errors import RequestError
from engine.sampling.grammar import Grammars

NUM_AT_ONCE = 32
"""Threads that wait for a grammar to be compiled."""


class GrammarCompiler:
    """Makes and checks the grammars of one Ingress, on threads of its own."""

    def __init__(self, grammars: Grammars, limits: Limits) -> None:
        self._max_chars = limits.max_grammar_chars
        self._checker = GrammarChecker(grammars, timeout_s=limits.grammar_timeout_s)
        self._threads = ThreadPoolExecutor(NUM_AT_ONCE, "grammars")
        self._converting = threading.Lock()

    async def compile(self, source: GrammarSource) -> str:
        """Return the grammar of a source.

        Raises:
            RequestError: the source is too long, is no grammar, or takes too long to compile; names the field.
            CapacityError: the process that compiles grammars does not start, or does not answer.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, source)

    def _compile(self, source: GrammarSource) -> str:
        grammar = self._convert(source)
        self._checker.check(grammar, source.field)
        return grammar

    def _convert(self, source: GrammarSource) -> str:
        field, value = source.field, source.value
        num_chars = len(value if isinstance(value, str) else json.dumps(value))
        if num_chars > self._max_chars:
            raise RequestError(f"{field} has {num_chars:,} characters, at most {self._max_chars:,} are allowed", field)
        # Python threads that compute take turns with the event loop, so there must be few of them.
        with self._converting if source.takes_long else nullcontext():
            try:
                return source.to_grammar()
            except RequestError as error:
                raise RequestError(f"{field}: {error}", field) from None
