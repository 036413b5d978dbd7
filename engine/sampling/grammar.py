"""Grammars: which tokens may come next, at the committed tip and after every draft token.

A grammar is text in llguidance's form (https://github.com/guidance-ai/llguidance), made by the functions below and
carried in `SamplingParams.grammar`. Whoever shapes logits keeps a matcher per request. It is a cache of the committed
tokens and nothing else: lost, it is built again from them. So a mask is a function of the grammar and of the tokens
before it, the same for drafter and verifier, and a part of the target's distribution like any other parameter.

A grammar that has come to its end allows the end-of-sequence tokens only, and so does one that gets too complex to
follow (`LIMITS`). Where that is depends on what was computed before: it is the one exception to the rule above.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig
from engine.errors import ModelError, RequestError
from engine.models.tokenizer import load_tokenizer
from engine.protocols import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""What a grammar may cost to begin with, and for one mask, in llguidance's units. They bound neither the time nor the
memory of compiling one: whoever takes grammars from strangers compiles each where it can be stopped first."""

NUM_COMPILED = 16
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,32}", "lenient": False}
"""Between the parts of JSON enough white space to indent, and too little to go on for ever."""


def from_json_schema(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON texts that a schema accepts.

    Raises:
        RequestError: the schema is no JSON.
    """
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False), overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"the JSON schema is not valid: {error}", "json") from None


def from_regex(pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def from_choice(texts: Sequence[str]) -> str:
    """Return the grammar of exactly these texts."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, texts)))


def from_text(text: str) -> str:
    """Return the grammar that is written in Lark's or in llama.cpp's (GBNF) notation.

    Raises:
        RequestError: it is neither.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the converter raises bare exceptions
        raise RequestError(f"the grammar is neither Lark nor GBNF: {error}", "grammar") from None


class Grammars:
    """Every grammar that this process applies, over one table made from the target's tokenizer.

    The table is made when it is first needed: for a vocabulary of 128,000 tokens that takes a second or so.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Make no table yet.

        Args:
            config: the target, whose tokenizer counts.
            vocab_size: the target's; its ids beyond the tokenizer's are never allowed.
            eos_token_ids: what ends a text.
        """
        self._config = config
        self._vocab_size = vocab_size
        self.ends = frozenset(eos_token_ids)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}
        self.end_mask = _pack(eos_token_ids, vocab_size)

    def table_settings(self) -> dict[str, Any]:
        """Return what llguidance makes its table from: JSON values, so that another process can make the same.

        Raises:
            ModelError: the model cannot follow a grammar: nothing ends its texts.
        """
        if not self.ends:
            raise ModelError("this model cannot follow a grammar: it has no end-of-sequence token")
        backend = copy(load_tokenizer(self._config).backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "n_vocab": self._vocab_size, "eos_token": sorted(self.ends)}

    @cached_property
    def _table(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(**self.table_settings())
        except ValueError as error:
            raise ModelError(f"this model cannot follow a grammar: {error}") from error

    def check(self, grammar: str, field: str = "grammar") -> None:
        """Refuse a grammar that cannot be applied.

        Raises:
            RequestError: naming the field and what is wrong, be it the grammar or the model.
        """
        try:
            matcher = self.compile(grammar)
        except ModelError as error:
            raise RequestError(str(error), field) from error
        matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{field}: {matcher.get_error().strip()[:500]}", field)

    def compile(self, grammar: str) -> "LLMatcher":
        """Return a matcher of its own at the grammar's beginning; it may be in an error state."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = LLMatcher(
                self._table, grammar, log_level=0, limits=LLParserLimits(**LIMITS)
            )
            if len(self._compiled) > NUM_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return matcher.deep_copy()

    def matcher(self, request_id: str, grammar: str) -> "Matcher":
        """Return a request's matcher."""
        if request_id not in self._matchers:
            self._matchers[request_id] = Matcher(self, grammar)
        return self._matchers[request_id]

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._matchers.pop(request_id, None)


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._grammars.compile(self._grammar)
        self._output: list[int] = []
        self._follows = True

    def masks(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bytes]:
        """Return which tokens may come next: a bit per token, the lowest of each byte first.

        Args:
            output: the tokens committed after the prompt.
            paths: [rows] the draft tokens between the committed tip and each row. Below a token that may not come
                all may: that token is never drawn, so neither is what follows it.
        """
        self._follow(output)
        return [self._after(path) for path in paths]

    def _follow(self, output: Sequence[int]) -> None:
        """Bring the matcher to the committed tip."""
        if self._output != output[: len(self._output)]:
            self._restart()
        new = list(output[len(self._output) :])
        if self._follows and self._matcher.try_consume_tokens(new) < len(new):
            self._follows = False
            logger.error("committed tokens left their grammar: %s", self._matcher.get_error() or "not allowed")
        self._output += new

    def _after(self, path: Sequence[int]) -> bytes:
        """Return the packed mask of what may follow the committed tip and `path`; the matcher stays at the tip."""
        if not self._follows or not self._grammars.ends.isdisjoint(path):
            return self._grammars.end_mask
        tokens = list(path)
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return b"\xff" * len(self._grammars.end_mask)
        taken = self._matcher.try_consume_tokens(tokens)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() or taken < len(tokens):
            logger.warning("a grammar got too complex, its text ends: %s", self._matcher.get_error())
            output = self._output
            self._restart()
            self._follow(output)
            return self._grammars.end_mask
        if taken:
            self._matcher.rollback(taken)
        # llguidance has one bit more than tokens, for its own use.
        return mask[: len(self._grammars.end_mask)]


def matcher_of(grammars: Grammars | None, request: Request) -> Matcher | None:
    """Return the matcher of a request that has a grammar.

    Raises:
        ModelError: the model cannot follow one; such a request should not have come so far.
    """
    if request.params.grammar is None:
        return None
    if grammars is None:
        raise ModelError("a request with a grammar reached a model that was loaded without grammars")
    return grammars.matcher(request.request_id, request.params.grammar)


def _literal(text: str) -> str:
    """Return a text in Lark's notation, which is JSON's except that DEL may not stand for itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pack(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Return a mask of these tokens in llguidance's form: one bit per token, whole 32-bit words."""
    mask = bytearray(4 * -(-vocab_size // 32))
    for token in token_ids:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)
