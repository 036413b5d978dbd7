"""Grammars: which tokens are allowed at the committed tip and after every draft token.

A grammar is text in llguidance's format (https://github.com/guidance-ai/llguidance), made by `grammar_text`. Drafter
and verifier keep a matcher per request, a cache that committed tokens can rebuild. So masks depend only on the grammar
and the tokens before, are equal for both, and shape the target's distribution like any parameter.

A finished grammar allows end-of-sequence tokens only. A grammar beyond `LIMITS` or its time for masks ends its request
with an error: an ambiguous grammar's masks take longer with every token, and delay the whole batch.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError, RequestError
from engine.models.source import ModelSource
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
"""Limits on a grammar's start and each mask, in llguidance's units. Compiling is unbounded: a service should first
compile clients' grammars in a process that it can kill."""

NUM_COMPILED = 16
MASKS_S = 0.05
"""Processor time that a request may take for all masks and tokens, besides the two times below."""
MASK_S, MASK_S_PER_TOKEN_ID = 3e-4, 2e-8
"""Further processor time for each mask or token, and the same per token id: a mask compares the whole vocabulary. Usual
JSON schemas take a tenth."""


def explain(error: str, grammar: str) -> str:
    """Explain why llguidance refuses a grammar; if no text matches it, llguidance's message names an internal state."""
    if not error.startswith("NoExtensionBias"):
        return error.strip()[:500]
    sources = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{}]
    if sources[-1].get("json_schema") is not None:
        return "no JSON is valid under the schema: it refers to itself without an end"
    if sources[-1].get("name") == "regex":
        return "no text matches the regular expression"
    return "no text matches the grammar: a rule leads only to itself, or an expression matches nothing"


class Grammars:
    """Compiles and caches this process's grammars, over a table of the target's tokens that takes a second to make."""

    def __init__(self, source: ModelSource, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Store the settings of the token table; ids below `vocab_size` that the tokenizer lacks are never allowed."""
        self._source = source
        self._vocab_size = vocab_size
        self.ends = frozenset(eos_token_ids)
        self.mask_s = MASK_S + vocab_size * MASK_S_PER_TOKEN_ID
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}
        mask = bytearray(4 * -(-vocab_size // 32))
        for token in eos_token_ids:
            mask[token // 8] |= 1 << token % 8
        self.end_mask = bytes(mask)
        """Allows end-of-sequence tokens only; a bit per token, in whole 32-bit words."""

    def table_settings(self) -> dict[str, Any]:
        """Return llguidance's token table arguments as JSON values; raise ModelError if the model has no end tokens."""
        if not self.ends:
            raise ModelError("this model cannot follow a grammar: it has no end-of-sequence token")
        backend = copy(self._source.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        tokenizer = json.loads(backend.to_str())
        _hide_special_tokens(tokenizer)
        return {"tokenizer": json.dumps(tokenizer), "n_vocab": self._vocab_size, "eos_token": sorted(self.ends)}

    @cached_property
    def _table(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(**self.table_settings())
        except ValueError as error:
            raise ModelError(f"this model cannot follow a grammar: {error}") from error

    def check(self, grammar: str, field: str = "grammar") -> None:
        """Raise RequestError, naming field and reason, if a grammar cannot be compiled for this model."""
        try:
            matcher = self.compile(grammar)
        except ModelError as error:
            raise RequestError(str(error), field) from error
        matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{field}: {explain(matcher.get_error(), grammar)}", field)

    def compile(self, grammar: str) -> "LLMatcher":
        """Return a new matcher at the start of a grammar; it may be in an error state."""
        from llguidance import LLMatcher, LLParserLimits

        if grammar not in self._compiled:
            limits = LLParserLimits(**LIMITS)
            self._compiled[grammar] = LLMatcher(self._table, grammar, log_level=0, limits=limits)
            if len(self._compiled) > NUM_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

    def matcher(self, request_id: str, grammar: str) -> "Matcher":
        if request_id not in self._matchers:
            self._matchers[request_id] = Matcher(self, grammar)
        return self._matchers[request_id]

    def release(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)


class Matcher:
    """The state of one request in its grammar."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._allowed_s = MASKS_S
        self.error = ""
        """Why no more masks are computed; empty while they are."""
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._grammars.compile(self._grammar)
        self._output: list[int] = []
        self._follows = True

    def masks(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bytes]:
        """Return each row's allowed tokens: a bit per token, the lowest of each byte first.

        output: the tokens committed after the prompt; paths: [rows] the draft tokens between the tip and each row.
        After a forbidden draft token everything is allowed, because such a row is never used.
        """
        masks, started = [], time.thread_time()
        num_new = len(output) - len(self._output)
        if not self.error:
            self._follow(output)
        for path in paths:
            masks.append(self._grammars.end_mask if self.error else self._after(path))
            now = time.thread_time()
            self._allowed_s += (1 + max(0, num_new)) * self._grammars.mask_s - (now - started)
            num_new, started = 0, now
            if self._allowed_s < 0 and not self.error:
                self.error = "its masks take too long"
        return masks

    def _follow(self, output: Sequence[int]) -> None:
        if self._output != output[: len(self._output)]:
            self._restart()
        new = list(output[len(self._output) :])
        if self._follows and self._matcher.try_consume_tokens(new) < len(new):
            self._follows = False
            if self._matcher.is_error():
                self.error = self._matcher.get_error()
                return
            logger.error("committed tokens violate their grammar: %s", self._matcher.get_error() or "not allowed")
        self._output += new

    def _after(self, path: Sequence[int]) -> bytes:
        """Return the mask after the committed tip and `path`; the matcher stays at the tip."""
        if not self._follows or not self._grammars.ends.isdisjoint(path):
            return self._grammars.end_mask
        tokens = list(path)
        if self._matcher.validate_tokens(tokens) < len(tokens):
            return b"\xff" * len(self._grammars.end_mask)
        taken = self._matcher.try_consume_tokens(tokens)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() or taken < len(tokens):
            self.error = self._matcher.get_error() or "a draft token was refused"
            return self._grammars.end_mask
        if taken:
            self._matcher.rollback(taken)
        # llguidance adds one bit for internal use.
        return mask[: len(self._grammars.end_mask)]


def _hide_special_tokens(tokenizer: dict[str, Any]) -> None:
    """Rename special tokens and tokens in angle brackets, which llguidance takes for special tokens.

    Where only one text can follow, llguidance allows the tokenizer's first token of it, and these would match nothing.
    """
    vocabulary = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        content, token_id = token["content"], token["id"]
        is_tag = content.startswith("<") and content.endswith(">")
        if content == tokenizer["model"].get("unk_token") or not (token["special"] or is_tag):
            continue
        token |= {"content": f"<\ufdd0{token_id}>", "special": True, "normalized": False}
        if isinstance(vocabulary, dict) and content in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(content)
        elif isinstance(vocabulary, list) and token_id < len(vocabulary):
            vocabulary[token_id][0] = token["content"]


def matcher_of(grammars: Grammars | None, request: Request) -> Matcher | None:
    """Return the matcher of a request with a grammar; raise ModelError if the model was loaded without grammars."""
    if request.params.grammar is None:
        return None
    if grammars is None:
        raise ModelError("a request with a grammar reached a model that was loaded without grammars")
    return grammars.matcher(request.request_id, request.params.grammar)
