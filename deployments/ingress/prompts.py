"""PromptEncoder: text and conversations to token ids, and back; clients cannot write special tokens.

`</s>` in a prompt is four characters, not the end of a sequence: a client's text is always encoded with special tokens
split. Long texts are tokenized in pieces, each of which waits for its turn, so that nobody waits for long.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.ingress.conversation import ChatTemplate, Segment
from deployments.ingress.lanes import Lanes
from deployments.ingress.pieces import PIECE_CHARS, PIECE_IDS, Pieces
from deployments.openai.messages import ChatMessage
from deployments.openai.tools import Tool, form_of
from engine.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MANY_MESSAGES = 64
"""A longer conversation counts as a long text, because rendering it takes a millisecond or more."""


class PromptEncoder:
    """Owns the tokenizer of one Ingress. Texts are tokenized on its `Lanes`, while the event loop streams."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer: Any = tokenizer
        self._lanes = Lanes(tokenizer)
        self._pieces = Pieces(tokenizer)
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template is not None else None
        self.tool_form = form_of(tokenizer.chat_template)
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    async def encode(self, text: str, max_model_len: int, *, max_ids: int | None = None) -> list[int]:
        """Return a prompt's token ids, with the special tokens that the tokenizer adds to every text.

        Args:
            max_ids: after how many ids a long text need not be tokenized any further; None tokenizes all of it.

        Raises:
            PromptTooLongError: the text has more characters than the context can hold, or more than `max_ids` ids.
        """
        self._check_length(len(text), max_model_len, "prompt")
        if len(text) <= PIECE_CHARS or not self._pieces.cuts_texts:
            return await self._lanes.run(_encode_prompt, text, is_long=len(text) > PIECE_CHARS)
        before, after = self._pieces.frame
        return [*before, *await self._encode_pieces([(text, True)], max_ids, "prompt"), *after]

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        max_model_len: int,
        tools: Sequence[Tool] = (),
        *,
        max_ids: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer starts.

        Args:
            tools: the functions that the model may call.
            max_ids: as for `encode`.

        Raises:
            RequestError: the model has no chat template, the template takes no tools, or it refuses the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        if tools and self.tool_form is None:
            raise RequestError("this model's chat template takes no tools, or in an unknown form", "tools")
        texts = [message.text() for message in messages]
        num_chars = sum(map(len, texts)) + _num_call_chars(messages)
        num_tool_chars = sum(len(tool.model_dump_json()) for tool in tools)
        self._check_length(num_chars, max_model_len, "messages")
        self._check_length(num_tool_chars, max_model_len, "tools")
        conversation = (messages, texts, tools)
        if num_chars + num_tool_chars <= PIECE_CHARS and len(messages) <= MANY_MESSAGES:
            return await self._lanes.run(_encode_chat, self._template, *conversation, is_long=False)
        segments = await self._lanes.run(_render, self._template, *conversation, is_long=True)
        return await self._encode_pieces(segments, max_ids, "messages")

    async def decode_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, of which there may be many."""
        is_long = len(token_ids) > PIECE_IDS
        pieces = self._pieces.of_ids(token_ids)
        return "".join([await self._lanes.run(_decode, piece, is_long=is_long) for piece in pieces])

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone, of which there may be many."""
        texts: list[str] = []
        for start in range(0, len(token_ids), PIECE_IDS):
            piece = token_ids[start : start + PIECE_IDS]
            texts += await self._lanes.run(_decode_each, piece, is_long=len(token_ids) > PIECE_IDS)
        return texts

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of a few token ids, at once."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each of a few tokens alone, at once."""
        return _decode_each(self._tokenizer, token_ids)

    async def _encode_pieces(self, segments: Iterable[Segment], max_ids: int | None, field: str) -> list[int]:
        ids: list[int] = []
        for text, is_clients in segments:
            for piece in self._pieces.of_text(text):
                ids += await self._lanes.run(_encode, piece, is_clients, is_long=True)
                if max_ids is not None and len(ids) > max_ids:
                    raise PromptTooLongError(
                        f"{field} has more than {max_ids:,} tokens, the model takes {max_ids:,} with the text to come",
                        field,
                    )
        return ids

    def _check_length(self, num_chars: int, max_model_len: int, field: str) -> None:
        most = max_model_len * self._longest_token
        if num_chars > most:
            raise PromptTooLongError(
                f"{field} has {num_chars:,} characters; {max_model_len:,} tokens hold at most {most:,}", field
            )


def _num_call_chars(messages: Sequence[ChatMessage]) -> int:
    calls = [call for message in messages for call in message.tool_calls or ()]
    num_chars = sum(len(call.id) + len(call.function.arguments) for call in calls)
    return num_chars + sum(len(message.tool_call_id or "") for message in messages)


# On the thread of a lane, with its tokenizer:


def _encode_prompt(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, split_special_tokens=True)["input_ids"]
    return ids


def _encode(tokenizer: Any, text: str, is_clients: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=is_clients)["input_ids"]
    return ids


def _render(tokenizer: Any, template: ChatTemplate, *conversation: Any) -> list[Segment]:
    return template.render(tokenizer, *conversation)


def _encode_chat(tokenizer: Any, template: ChatTemplate, *conversation: Any) -> list[int]:
    segments = template.render(tokenizer, *conversation)
    return [token_id for text, is_clients in segments for token_id in _encode(tokenizer, text, is_clients)]


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text


def _decode_each(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in token_ids]
