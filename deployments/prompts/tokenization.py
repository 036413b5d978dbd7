"""/tokenize and /detokenize: their requests and bodies."""

from deployments.openai.conversation_fields import ConversationRequest, Messages
from deployments.openai.types import RequestModel, ResponseModel, TokenId


class TokenizeRequest(ConversationRequest):
    """The body of /tokenize: a prompt, or messages to run through the chat template."""

    model: str | None = None
    """The served model's name; null is the only one."""
    prompt: str | None = None
    """Text to tokenize as /v1/completions would."""
    messages: Messages | None = None
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
