"""PromptEncoder: text and conversations to token ids, and back; clients cannot write special tokens.

`</s>` in a prompt is four characters, not the end of a sequence: a client's text is always encoded with special tokens
split. Long texts are tokenized in pieces, each of which waits for its turn, so that nobody waits for long.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deployments.ingress.conversation import ChatTemplate, Segment
from deployments.ingress.lanes import Lanes
from deployments.ingress.pieces import PIECE_CHARS, PIECE_IDS, Pieces
from deployments.openai.chat_template import Rendering
from deployments.openai.messages import AssistantMessage, ChatMessage, ToolMessage
from deployments.openai.tools import form_of
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
        self._special_ids = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._token_texts = _TokenTexts(tokenizer)

    async def encode(
        self, text: str, max_model_len: int, *, adds_special_tokens: bool = True, max_ids: int | None = None
    ) -> list[int]:
        """Return a prompt's token ids; those of no text are the token that begins, or else ends, a document.

        Args:
            adds_special_tokens: add those that the tokenizer puts around every text.
            max_ids: after how many ids a long text need not be tokenized any further; None tokenizes all of it.

        Raises:
            PromptTooLongError: the text has more characters than the context can hold, or more than `max_ids` ids.
            RequestError: there is no token, special ones included.
        """
        self._check_length(len(text), max_model_len, "prompt")
        if len(text) <= PIECE_CHARS or not self._pieces.cuts_texts:
            is_long = len(text) > PIECE_CHARS
            ids = await self._lanes.run(_encode_prompt, text, adds_special_tokens, is_long=is_long)
            return ids or [self._beginning(adds_special_tokens)]
        before, after = self._pieces.frame if adds_special_tokens else ([], [])
        return [*before, *await self._encode_pieces([(text, True)], max_ids, "prompt"), *after]

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        max_model_len: int,
        rendering: Rendering | None = None,
        *,
        max_ids: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer starts.

        Args:
            max_ids: as for `encode`.

        Raises:
            RequestError: the model has no chat template, the template takes no tools, or it refuses the conversation.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        rendering = rendering or Rendering()
        if rendering.tools and self.tool_form is None:
            raise RequestError("this model's chat template takes no tools, or in an unknown form", "tools")
        texts = [message.text() for message in messages]
        sizes = {
            "messages": sum(map(len, texts)) + _num_other_chars(messages),
            "tools": sum(len(tool.model_dump_json()) for tool in rendering.tools),
            "chat_template_kwargs": len(json.dumps(rendering.variables)),
        }
        for field, num_chars in sizes.items():
            self._check_length(num_chars, max_model_len, field)
        conversation = (messages, texts, rendering)
        before, after = self._pieces.frame if rendering.adds_special_tokens else ([], [])
        if sum(sizes.values()) <= PIECE_CHARS and len(messages) <= MANY_MESSAGES:
            return [*before, *await self._lanes.run(_encode_chat, self._template, *conversation, is_long=False), *after]
        segments = await self._lanes.run(_render, self._template, *conversation, is_long=True)
        return [*before, *await self._encode_pieces(segments, max_ids, "messages"), *after]

    async def decode_tokens(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; a long list takes turns with others."""
        if skip_special_tokens:  # before they are cut: the bytes around such a token may be one character
            token_ids = [token_id for token_id in token_ids if token_id not in self._special_ids]
        is_long = len(token_ids) > PIECE_IDS
        pieces = self._pieces.of_ids(token_ids)
        return "".join([await self._lanes.run(_decode, piece, is_long=is_long) for piece in pieces])

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone; a long list takes turns with others."""
        texts: list[str] = []
        for start in range(0, len(token_ids), PIECE_IDS):
            piece = token_ids[start : start + PIECE_IDS]
            texts += await self._lanes.run(_decode_each, piece, is_long=len(token_ids) > PIECE_IDS)
        return texts

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone, at once; on any thread."""
        return [self._token_texts[token_id] for token_id in token_ids]

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

    def _beginning(self, adds_special_tokens: bool) -> int:
        """Return the token before the first of a document."""
        begins, ends = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        beginning: int | None = ends if begins is None else begins
        if beginning is None or not adds_special_tokens:
            raise RequestError("prompt is empty; it must have at least one token", "prompt")
        return beginning

    def _check_length(self, num_chars: int, max_model_len: int, field: str) -> None:
        most = max_model_len * self._longest_token
        if num_chars > most:
            raise PromptTooLongError(
                f"{field} has {num_chars:,} characters; {max_model_len:,} tokens hold at most {most:,}", field
            )


class _TokenTexts(dict[int, str]):
    """The text of each token, made when it is first asked for: log probabilities ask for hundreds in a round."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id])
        self[token_id] = text
        return text


def _num_other_chars(messages: Sequence[ChatMessage]) -> int:
    """Return the characters of calls and thoughts."""
    num_chars = sum(len(message.tool_call_id) for message in messages if isinstance(message, ToolMessage))
    for message in messages:
        if isinstance(message, AssistantMessage):
            num_chars += len(message.reasoning_content or "")
            num_chars += sum(len(call.id) + len(call.function.arguments) for call in message.tool_calls or ())
    return num_chars


# On the thread of a lane, with its tokenizer:


def _encode_prompt(tokenizer: Any, text: str, adds_special_tokens: bool) -> list[int]:
    encoding = tokenizer(text, add_special_tokens=adds_special_tokens, split_special_tokens=True)
    ids: list[int] = encoding["input_ids"]
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
