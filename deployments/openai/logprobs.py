"""Log probabilities of tokens, as completions and as chat completions show them."""

from collections.abc import Sequence
from typing import Any

from deployments.openai.types import ResponseModel
from deployments.openai.writer import Choice, TokenTexts
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
    num_alternatives: int | None, choice: Choice, token_texts: TokenTexts
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
            for token, logprob, rank, text in zip(ids, logprobs, ranks, token_texts(ids), strict=True)
        }

    scores = choice.prompt_logprobs or []
    return {"prompt_logprobs": [None, *map(by_id, choice.prompt_token_ids[1:], scores)]}


def completion_logprobs(
    choice: Choice,
    tokens: Choice | RequestOutput,
    prompt_logprobs: Sequence[TokenLogprobs] | None,
    token_texts: TokenTexts,
) -> CompletionLogprobs:
    """Return the log probabilities of the next tokens of a completion.

    `choice` keeps how many characters were returned; `prompt_logprobs` begin at an echoed prompt's second token.
    """
    token_ids = tokens.token_ids
    positions: list[TokenLogprobs | None] = [*(tokens.logprobs or [])]
    if prompt_logprobs is not None:
        token_ids = choice.prompt_token_ids + token_ids
        positions = [None, *prompt_logprobs, *positions]
    texts = token_texts(token_ids)
    offsets = []
    for text in texts:
        offsets.append(choice.num_logprob_chars)
        choice.num_logprob_chars += len(text)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[position.logprob if position else None for position in positions],
        tokens=texts,
        top_logprobs=[
            dict(zip(token_texts(position.top_ids), position.top_logprobs, strict=True)) | {text: position.logprob}
            if position
            else None
            for text, position in zip(texts, positions, strict=True)
        ],
    )


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_texts: TokenTexts) -> ChatLogprobs:
    """Return the log probabilities of tokens of a message."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_alternative(text, position.logprob),
                top_logprobs=[
                    TopLogprob(**_alternative(top, logprob))
                    for top, logprob in zip(token_texts(position.top_ids), position.top_logprobs, strict=True)
                ],
            )
            for text, position in zip(token_texts(token_ids), logprobs, strict=True)
        ]
    )


def _alternative(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
