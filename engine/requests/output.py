"""RequestOutput: what a round adds to a request, as the engine hands it on."""

from dataclasses import dataclass, field
from typing import Literal

from engine.protocols import Difference, TokenLogprobs

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """A round of a request: the text of each committed token, the accepted nodes, and the verified draft.

    The texts add up to the output's text: a character made of several tokens is in the last token's text.
    """

    texts: list[str]
    path: list[int]
    draft_token_ids: list[int]
    parents: list[int]


@dataclass(slots=True)
class RequestOutput:
    """The tokens and text that one round added to one request.

    `text` can lag behind `token_ids`: the beginning of a stop string or of a character is held back. After an error,
    `stop_reason` is its message.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For each prompt token from the second on; only in the first output."""
    trace: RoundTrace | None = None
    num_predicted_tokens: int = 0
    """Accepted draft tokens that the client predicted."""
    differences: list[Difference] = field(default_factory=list)
