"""Log probabilities of tokens, as completions and as chat completions show them."""

import codecs
from collections.abc import Sequence

from deployments.openai.types import ResponseModel
from deployments.openai.writer import Choice
from engine.detokenizer import TokenBytes
from engine.protocols import RequestOutput, TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM's number."""


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
    """One token at a position of the prompt; rank 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, in vLLM's form: null for the first, then by token id its own and the likeliest ones'."""


def num_logprobs(positions: Sequence[TokenLogprobs] | None) -> int:
    """Return the number of log probabilities, if all positions have as many alternatives."""
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
    """Finds where tokens begin in a growing text, in characters; those inside a character, where that begins."""

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], *, skips_special: bool) -> None:
        """Start after a prompt, or without one if the text begins with it."""
        self._token_bytes, self._skips_special = token_bytes, skips_special
        before = [token_id for token_id in prompt if not self._is_hidden(token_id)]
        self.is_begun = bool(before)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(token_bytes, before[-3:])))
        # A character that the prompt began is no part of the text.
        self._length = -bool(self._decoder.getstate()[0])

    def add(self, token_id: int, *, is_echo: bool) -> int:
        """Return where the next token begins; an echo has no special tokens."""
        if self._is_hidden(token_id, is_echo=is_echo):
            return max(0, self._length)
        data = self._token_bytes(token_id, is_first=not self.is_begun)
        self.is_begun = True
        start = self._length + len(self._decoder.decode(data[:1]))
        is_inside = bool(self._decoder.getstate()[0])
        self._length = start + len(self._decoder.decode(data[1:]))
        return max(0, start - (bool(data) and not is_inside))

    def _is_hidden(self, token_id: int, *, is_echo: bool = False) -> bool:
        return (is_echo or self._skips_special) and token_id in self._token_bytes.special_ids


def completion_logprobs(
    choice: Choice,
    tokens: Choice | RequestOutput,
    prompt_logprobs: Sequence[TokenLogprobs] | None,
    token_bytes: TokenBytes,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """Return the log probabilities of the next tokens of a completion.

    `prompt_logprobs` begin at an echoed prompt's second token.
    """
    prompt = [] if prompt_logprobs is None else choice.prompt_token_ids
    positions: list[TokenLogprobs | None] = [*(tokens.logprobs or [])]
    if prompt_logprobs is not None:
        positions = [None, *prompt_logprobs, *positions]
    texts, starts = [], []
    tops: list[dict[str, float] | None] = []
    for index, (token_id, position) in enumerate(zip([*prompt, *tokens.token_ids], positions, strict=True)):
        ids = [token_id, *(position.top_ids if position else ())]
        text, *others = (token_bytes(an_id, is_first=not offsets.is_begun).decode(errors="replace") for an_id in ids)
        texts.append(text)
        starts.append(offsets.add(token_id, is_echo=index < len(prompt)))
        if position is None:
            tops.append(None)
            continue
        # Parts of characters may look alike; the likelier one is kept.
        likeliest_last = reversed([*zip(others, position.top_logprobs, strict=True)])
        tops.append(dict(likeliest_last) | {text: position.logprob})
    return CompletionLogprobs(
        text_offset=starts,
        token_logprobs=[position.logprob if position else None for position in positions],
        tokens=texts,
        top_logprobs=tops,
    )


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> ChatLogprobs:
    """Return the log probabilities of tokens of a message."""

    def alternative(token_id: int, logprob: float) -> TopLogprob:
        data = token_bytes(token_id)
        return TopLogprob(token=data.decode(errors="replace"), logprob=max(logprob, LEAST_LOGPROB), bytes=[*data])

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **dict(alternative(token_id, position.logprob)),
                top_logprobs=list(map(alternative, position.top_ids, position.top_logprobs)),
            )
            for token_id, position in zip(token_ids, logprobs, strict=True)
        ]
    )
