"""Log probabilities of tokens, as completions and as chat completions show them."""

from collections.abc import Sequence
from typing import Any

from deployments.openai.choices import Choice
from deployments.openai.fields import ResponseModel
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.writer import Decoder
from engine.protocols import TokenLogprobs

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
    """Return how many log probabilities there are at some positions, which all have as many alternatives."""
    return len(positions) * (1 + len(positions[0].top_ids)) if positions else 0


def prompt_logprobs_field(request: GenerationRequest, choice: Choice, decoder: Decoder) -> dict[str, PromptLogprobs]:
    """Return the field with the log probabilities of a prompt's tokens, if the client asked for it."""
    num_alternatives = request.prompt_logprobs
    if num_alternatives is None:
        return {}

    def by_id(token_id: int, position: TokenLogprobs) -> dict[int, PromptLogprob]:
        ids = [token_id, *position.top_ids[:num_alternatives]]
        logprobs = [position.logprob, *position.top_logprobs[:num_alternatives]]
        ranks = [position.rank, *range(1, num_alternatives + 1)]
        return {
            token: PromptLogprob(logprob=max(logprob, LEAST_LOGPROB), rank=rank, decoded_token=text)
            for token, logprob, rank, text in zip(ids, logprobs, ranks, decoder.token_texts(ids), strict=True)
        }

    scores = choice.prompt_logprobs or []
    return {"prompt_logprobs": [None, *map(by_id, choice.prompt_token_ids[1:], scores)]}


def completion_logprobs(
    choice: Choice,
    token_ids: list[int],
    logprobs: Sequence[TokenLogprobs],
    prompt_logprobs: Sequence[TokenLogprobs] | None,
    decoder: Decoder,
) -> CompletionLogprobs:
    """Return the log probabilities of the next tokens of a completion.

    Args:
        choice: the choice that they belong to; it keeps how many characters have been reported.
        prompt_logprobs: those of the prompt's tokens from the second on, if the prompt is to be reported first.
    """
    positions: list[TokenLogprobs | None] = [*logprobs]
    if prompt_logprobs is not None:
        token_ids = choice.prompt_token_ids + token_ids
        positions = [None, *prompt_logprobs, *positions]
    texts = decoder.token_texts(token_ids)
    offsets = []
    for text in texts:
        offsets.append(choice.num_logprob_chars)
        choice.num_logprob_chars += len(text)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[position.logprob if position else None for position in positions],
        tokens=texts,
        top_logprobs=[
            dict(zip(decoder.token_texts(position.top_ids), position.top_logprobs, strict=True))
            | {text: position.logprob}
            if position
            else None
            for text, position in zip(texts, positions, strict=True)
        ],
    )


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], decoder: Decoder) -> ChatLogprobs:
    """Return the log probabilities of some tokens of a message."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_alternative(text, position.logprob),
                top_logprobs=[
                    TopLogprob(**_alternative(top, logprob))
                    for top, logprob in zip(decoder.token_texts(position.top_ids), position.top_logprobs, strict=True)
                ],
            )
            for text, position in zip(decoder.token_texts(token_ids), logprobs, strict=True)
        ]
    )


def _alternative(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
