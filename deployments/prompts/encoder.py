"""PromptEncoder: text and conversations to token ids, and back.

A client's text is always encoded with special tokens split: `</s>` in a prompt is four characters, not the end.
Short and long texts have a thread each: while a prompt of 1 MiB takes 1 to 2 s, a short text takes at most 40 ms and
the event loop pauses for at most 60 ms (two cores).
"""

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.conversation_fields import AssistantMessage, ChatMessage, ToolMessage, text_of
from deployments.openai.sampling_fields import Prediction
from deployments.openai.tools import CALLS
from deployments.prompts.conversation import ChatTemplate
from deployments.prompts.message_forms import form_of
from deployments.prompts.tokenization import TokenizeRequest
from engine.errors import PromptTooLongError, RequestError
from engine.requests.detokenizer import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONG_CHARS = 16 * 2**10
LONG_IDS = 2**12
MANY_MESSAGES = 64
"""Longer texts, lists of ids and conversations take some 1 to 10 milliseconds, on the thread of long texts."""

T = TypeVar("T")
ConversationBody = ChatCompletionRequest | TokenizeRequest


class PromptEncoder:
    """Owns the tokenizer of one Ingress."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer: Any = tokenizer
        # Two copies, because threads would share a tokenizer's flag for splitting special tokens.
        self._short = tokenizer, ThreadPoolExecutor(1, "short texts")
        self._long = copy.deepcopy(tokenizer), ThreadPoolExecutor(1, "long texts")
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self.form = form_of(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self.token_bytes = TokenBytes.of(tokenizer)

    async def encode(self, text: str, max_model_len: int, *, adds_special_tokens: bool = True) -> list[int]:
        """Return a prompt's ids; an empty prompt becomes the token that begins or ends documents, else RequestError."""
        self._check_length(len(text), max_model_len, "prompt")
        is_long = len(text) > LONG_CHARS
        ids = await self._run(_encode_prompt, text, adds_special_tokens, is_long=is_long)
        begins, ends = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        beginning = ends if begins is None else begins
        if not ids and (beginning is None or not adds_special_tokens):
            raise RequestError("prompt is empty; it must have at least one token", "prompt")
        return ids or [beginning]

    async def encode_prediction(self, prediction: Prediction | None, max_model_len: int) -> list[int]:
        """Return the token ids of the text that a client predicts, if any; raise PromptTooLongError."""
        text = text_of(None if prediction is None else prediction.content)
        self._check_length(len(text), max_model_len, "prediction")
        return await self._run(_encode_prompt, text, False, is_long=len(text) > LONG_CHARS) if text else []

    async def encode_answer(self, text: str, max_model_len: int) -> list[int]:
        """Return the ids of a model's own text, in which special tokens are themselves; raise PromptTooLongError."""
        self._check_length(len(text), max_model_len, "text")
        return await self._run(_encode_answer, text, is_long=len(text) > LONG_CHARS)

    async def encode_chat(self, request: ConversationBody, max_model_len: int) -> list[int]:
        """Return a conversation's token ids, up to where the answer starts; raise RequestError if it is refused."""
        variables, messages = request.template_variables(), request.messages or []
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        if request.offered_tools and not (self.form and CALLS in self.form.template["fields"]):
            raise RequestError("this model's chat template takes no tools, or in an unknown form", "tools")
        sizes = {
            "messages": sum(map(_num_chars, messages)),
            "tools": sum(len(tool.model_dump_json()) for tool in request.offered_tools),
            "chat_template_kwargs": len(json.dumps(variables)),
        }
        for field, num_chars in sizes.items():
            self._check_length(num_chars, max_model_len, field)
        is_long = sum(sizes.values()) > LONG_CHARS or len(messages) > MANY_MESSAGES
        return await self._run(_encode_chat, self._template, request, is_long=is_long)

    async def answer_begun(self, request: ConversationBody, prompt: Sequence[int]) -> str:
        """Return the end of a conversation's prompt, which holds all that the prompt has of the answer."""
        if request.continue_final_message:
            return await self.decode_tokens(prompt)
        # The beginning of an answer has fewer tokens.
        return "" if request.add_generation_prompt is False else await self.decode_tokens(prompt[-64:])

    async def decode_tokens(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._run(_decode, token_ids, skip_special_tokens, is_long=len(token_ids) > LONG_IDS)

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        return await self._run(lambda _: self.token_bytes.texts(token_ids), is_long=len(token_ids) > LONG_IDS)

    async def _run(self, function: Callable[..., T], *args: Any, is_long: bool) -> T:
        """Call `function` with a thread's tokenizer, unless cancelled before its turn."""
        tokenizer, thread = self._long if is_long else self._short
        return await asyncio.get_running_loop().run_in_executor(thread, function, tokenizer, *args)

    def _check_length(self, num_chars: int, max_model_len: int, field: str) -> None:
        limit = max_model_len * self._longest_token
        if num_chars > limit:
            raise PromptTooLongError(
                f"{field} has {num_chars:,} characters; {max_model_len:,} tokens hold at most {limit:,}", field
            )


def _num_chars(message: ChatMessage) -> int:
    num_chars = len(message.text())
    match message:
        case ToolMessage():
            num_chars += len(message.tool_call_id)
        case AssistantMessage():
            num_chars += len(message.thoughts or "")
            num_chars += sum(len(call.id) + len(call.function.arguments) for call in message.tool_calls or ())
    return num_chars


# Called on a thread, with its tokenizer:


def _encode_prompt(tokenizer: Any, text: str, adds_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=adds_special_tokens, split_special_tokens=True)["input_ids"]
    return ids


def _encode_answer(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
    return ids


def _encode_chat(tokenizer: Any, template: ChatTemplate, request: ConversationBody) -> list[int]:
    ids: list[int] = []
    for text, is_clients in template.render(tokenizer, request, request.messages or []):
        ids += tokenizer(text, add_special_tokens=False, split_special_tokens=is_clients)["input_ids"]
    if not request.add_special_tokens:
        return ids
    mark = _encode_prompt(tokenizer, "a", False)
    framed = _encode_prompt(tokenizer, "a", True)
    start = next((i for i in range(len(framed)) if framed[i : i + len(mark)] == mark), None)
    return ids if start is None else [*framed[:start], *ids, *framed[start + len(mark) :]]


def _decode(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    # `decode_batch` releases the GIL, `decode` does not: 260,000 ids would stop the event loop for 0.1 s.
    (text,) = tokenizer.backend_tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
    return str(text)
