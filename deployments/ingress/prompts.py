"""PromptEncoder: text and conversations to token ids; clients cannot write special tokens.

`</s>` in a prompt is four characters, not the end of a sequence: a client's text is always encoded with special tokens
split. In a conversation, the special tokens of the chat template must survive. So a message that contains the text of a
special token is replaced by a random stand-in while the template is rendered.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError

from deployments.openai.messages import ChatMessage
from deployments.openai.tools import PastCall, Tool, form_of
from engine.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")


class PromptEncoder:
    """Owns the tokenizer of one Ingress.

    All calls run on one thread of its own: a long prompt takes tens of milliseconds, during which the event loop should
    stream, and whether a fast tokenizer splits special tokens is a flag that threads would share.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer: Any = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.tool_form = form_of(tokenizer.chat_template)
        self._longest_token = max(map(len, tokenizer.get_vocab()))

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call one of the methods below on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def encode(self, text: str, max_model_len: int, field: str = "prompt") -> list[int]:
        """Return a prompt's token ids, with the special tokens that the tokenizer adds to every text.

        Raises:
            PromptTooLongError: the text has more characters than the context can hold; it was not tokenized.
        """
        self._check_length(len(text), max_model_len, field)
        return self._ids(self._tokenizer(text, split_special_tokens=True))

    def encode_chat(self, messages: Sequence[ChatMessage], max_model_len: int, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a conversation, up to where the answer starts.

        Args:
            tools: the functions that the model may call.

        Raises:
            RequestError: the model has no chat template, the template takes no tools, or it refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        texts = [message.text() for message in messages]
        self._check_length(sum(map(len, texts)), max_model_len, "messages")
        offered = [tool.model_dump(exclude_none=True) for tool in tools]
        if offered and self.tool_form is None:
            raise RequestError("this model's chat template takes no tools, or in an unknown form", "tools")
        if offered:
            self._check_plain(offered, max_model_len, "tools")
        stand_ins: dict[str, str] = {}
        conversation = []
        for message, text in zip(messages, texts, strict=True):
            if self._holds_special_token(text):
                # Letters and digits only: no template or normalizer changes them. Random: no client can guess it.
                stand_in = f"text{secrets.token_hex(16)}"
                stand_ins[stand_in] = text
                text = stand_in
            role = "system" if message.role == "developer" else message.role
            entry: dict[str, Any] = {"role": role, "content": text}
            if message.name:
                entry["name"] = message.name
            if message.tool_call_id is not None:
                entry["tool_call_id"] = message.tool_call_id
                self._check_plain(message.tool_call_id, max_model_len, "messages")
            if message.tool_calls is not None:
                entry["tool_calls"] = [_past_call(call) for call in message.tool_calls]
                self._check_plain(entry["tool_calls"], max_model_len, "messages")
            conversation.append(entry)
        return self._encode_rendered(self._render(conversation, offered), stand_ins)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]

    def _check_length(self, num_chars: int, max_model_len: int, field: str) -> None:
        most = max_model_len * self._longest_token
        if num_chars > most:
            raise PromptTooLongError(
                f"{field} has {num_chars:,} characters; {max_model_len:,} tokens hold at most {most:,}", field
            )

    def _holds_special_token(self, text: str) -> bool:
        plain = self._ids(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True))
        return plain != self._ids(self._tokenizer(text, add_special_tokens=False))

    def _check_plain(self, value: object, max_model_len: int, field: str) -> None:
        """Refuse the text of special tokens in what the template writes as JSON, where no stand-in is possible."""
        text = json.dumps(value, ensure_ascii=False)
        self._check_length(len(text), max_model_len, field)
        if self._holds_special_token(text):
            raise RequestError(f"{field} holds the text of a special token in a tool or a call", field)

    def _render(self, conversation: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                conversation, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {error}", "messages") from None
        return rendered

    def _encode_rendered(self, rendered: str, stand_ins: dict[str, str]) -> list[int]:
        """Encode a rendered template; each stand-in becomes its message's text, with special tokens split."""
        ids: list[int] = []
        for stand_in, text in stand_ins.items():
            before, _, rendered = rendered.partition(stand_in)
            ids += self._ids(self._tokenizer(before, add_special_tokens=False))
            ids += self._ids(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True))
        return ids + self._ids(self._tokenizer(rendered, add_special_tokens=False))

    @staticmethod
    def _ids(encoding: Any) -> list[int]:
        ids: list[int] = encoding["input_ids"]
        return ids


def _past_call(call: PastCall) -> dict[str, Any]:
    """Return a call as chat templates expect it: with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not JSON: {error}", "messages") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of call {call.id[:100]!r} are not a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
