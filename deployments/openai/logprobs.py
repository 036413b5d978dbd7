"""Log probabilities of tokens, as completions and as chat completions show them."""

import codecs
from collections.abc import Sequence
from typing import Any

from deployments.openai.types import ResponseModel
from deployments.openai.writer import Choice
from engine.protocols import TokenLogprobs
from engine.requests.detokenizer import TokenBytes
from engine.requests.output import RequestOutput

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks; vLLM's number


class CompletionLogprobs(ResponseModel):
    """Log probabilities of a completion's tokens."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(ResponseModel):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token at a position, and the alternatives to it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]


class PromptLogprob(ResponseModel):
    """A token at a position of the prompt; rank 1 is the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, by token id, the token and its likeliest alternatives; null for the first token."""


def num_logprobs(positions: Sequence[TokenLogprobs] | None) -> int:
    """Return the number of log probabilities; all positions have equally many alternatives."""
    return len(positions) * (1 + len(positions[0].top_ids)) if positions else 0


def prompt_logprobs_field(
    num_alternatives: int | None, choice: Choice, token_bytes: TokenBytes
) -> dict[str, PromptLogprobs]:
    """Return the field with the prompt's log probabilities, if requested."""
    if num_alternatives is None:
        return {}

    def by_id(token_id: int, position: TokenLogprobs) -> dict[int, PromptLogprob]:
        ids = [token_id, *position.top_ids[:num_alternatives]]
        logprobs = [position.logprob, *position.top_logprobs[:num_alternatives]]
        ranks = [position.rank, *range(1, num_alternatives + 1)]
        return {
            token: PromptLogprob(logprob=max(logprob, LEAST_LOGPROB), rank=rank, decoded_token=text)
            for token, logprob, rank, text in zip(ids, logprobs, ranks, token_bytes.texts(ids), strict=True)
        }

    scores = choice.prompt_logprobs or []
    return {"prompt_logprobs": [None, *map(by_id, choice.prompt_token_ids[1:], scores)]}


class TextOffsets:
    """Finds where tokens begin in a growing text, in characters; a token inside a character begins where that does."""

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], *, skips_special: bool) -> None:
        """Start after `prompt`, which is empty if the text echoes it."""
        self._token_bytes, self._hidden = token_bytes, token_bytes.special_ids if skips_special else frozenset()
        before = [token_id for token_id in prompt if token_id not in self._hidden]
        self.is_begun = bool(before)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(token_bytes, before[-3:])))
        # The text does not contain a character that the prompt began.
        self._length = -bool(self._decoder.getstate()[0])

    def add(self, token_id: int, *, is_echo: bool) -> int:
        """Return where the next token begins; an echo has no special tokens."""
        if token_id in (self._token_bytes.special_ids if is_echo else self._hidden):
            return max(0, self._length)
        data = self._token_bytes(token_id, is_first=not self.is_begun)
        self.is_begun = True
        start = self._length + len(self._decoder.decode(data[:1]))
        is_inside = bool(self._decoder.getstate()[0])
        self._length = start + len(self._decoder.decode(data[1:]))
        return max(0, start - (bool(data) and not is_inside))


def completion_logprobs(
    choice: Choice,
    tokens: Choice | RequestOutput,
    prompt_logprobs: Sequence[TokenLogprobs] | None,
    token_bytes: TokenBytes,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """Return log probabilities of `tokens`, after those of an echoed prompt, which start at its second token."""
    token_ids, num_echoed = tokens.token_ids, 0
    positions: list[TokenLogprobs | None] = [*(tokens.logprobs or [])]
    if prompt_logprobs is not None:
        token_ids, num_echoed = choice.prompt_token_ids + token_ids, len(choice.prompt_token_ids)
        positions = [None, *prompt_logprobs, *positions]
    shown = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for index, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        alternatives = position.top_ids if position else []
        text, *texts = token_bytes.texts([token_id, *alternatives], is_first=not offsets.is_begun)
        shown.tokens.append(text)
        shown.text_offset.append(offsets.add(token_id, is_echo=index < num_echoed))
        shown.token_logprobs.append(position.logprob if position else None)
        # Parts of characters may look alike; the likelier is kept.
        top = [*zip(texts, position.top_logprobs, strict=True)][::-1] if position else []
        shown.top_logprobs.append(dict(top) | {text: position.logprob} if position else None)
    return shown


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """Return the log probabilities of tokens of a message."""

    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": [*data]}

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **fields(token_id, position.logprob),
                top_logprobs=[
                    TopLogprob(**fields(*top)) for top in zip(position.top_ids, position.top_logprobs, strict=True)
                ],
            )
            for token_id, position in zip(token_ids, logprobs, strict=True)
        ]
    )
