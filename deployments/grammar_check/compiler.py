"""GrammarCompiler: from a client's schema, expression or choices to a grammar that is known to compile."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from deployments.config import Limits
from deployments.grammar_check.checker import GrammarChecker
from deployments.openai.structured_output import GrammarSource
from engine.errors import RequestError
from engine.sampling.grammar import Grammars


class GrammarCompiler:
    """Makes and checks the grammars of one Ingress, on one thread of its own."""

    def __init__(self, grammars: Grammars, limits: Limits) -> None:
        self._max_chars = limits.max_grammar_chars
        self._checker = GrammarChecker(grammars, timeout_s=limits.grammar_timeout_s)
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compile(self, source: GrammarSource) -> str:
        """Return the grammar of a source.

        Raises:
            RequestError: the source is too long, is no grammar, or takes too long to compile; names the field.
            CapacityError: the process that compiles grammars could not be started.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, source)

    def _compile(self, source: GrammarSource) -> str:
        field, value = source.field, source.value
        num_chars = len(value if isinstance(value, str) else json.dumps(value))
        if num_chars > self._max_chars:
            raise RequestError(f"{field} has {num_chars:,} characters, at most {self._max_chars:,} are allowed", field)
        try:
            grammar = source.to_grammar()
        except RequestError as error:
            raise RequestError(f"{field}: {error}", field) from None
        self._checker.check(grammar, field)
        return grammar
