"""/tokenize and /detokenize: their requests and bodies."""

from typing import Annotated

from pydantic import Field

from deployments.openai import fields
from deployments.openai.chat_template import ConversationRequest
from deployments.openai.fields import RequestModel, ResponseModel, TokenId
from deployments.openai.messages import ChatMessage


class TokenizeRequest(ConversationRequest):
    """The body of /tokenize: a prompt, or messages to run through the chat template."""

    model: str | None = None
    """The served model's name; null is the only one."""
    prompt: fields.Text | None = None
    """Text to tokenize as /v1/completions would."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """A conversation to tokenize as /v1/chat/completions would."""
    add_special_tokens: bool | None = None
    """As for /v1/completions and /v1/chat/completions."""
    return_token_strs: bool | None = None
    """The text of each token besides its id."""


class DetokenizeRequest(RequestModel):
    """The body of /detokenize."""

    model: str | None = None
    """The served model's name; null is the only one."""
    tokens: list[TokenId]
    """Token ids."""


class Tokens(ResponseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(ResponseModel):
    """The text of token ids."""

    prompt: str
