"""RequestReader: from a parsed request of any API to token ids and sampling parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.responses_request import renamed
from deployments.openai.tools import MessageForm
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.grammar_compiler import GrammarCompiler
from deployments.prompts.parameters import check_token_ids, fit, sampling_params
from deployments.wire import ModelLimits
from engine.errors import RequestError
from engine.params import SamplingParams


class Conversation(Protocol):
    """A request of /v1/chat/completions, /v1/responses or /v1/messages."""

    CHAT_FIELDS: ClassVar[Mapping[str, str]]

    def to_chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat completion request; raise RequestError if none is equivalent."""
        ...


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request as the engine takes it: `prompts` [prompts][tokens], and parameters whose grammar is compiled."""

    request: CompletionRequest | ChatCompletionRequest
    prompts: list[list[int]]
    params: SamplingParams
    predicted_token_ids: list[int]
    form: MessageForm | None = None
    """How the model writes messages, if the request is a conversation and that is known."""
    begun: str = ""
    """The end of a conversation's prompt, which may hold the beginning of the answer."""
    echoes: Sequence[str] = ()
    """The prompts' texts, if a completion echoes them."""


class RequestReader:
    """Reads requests for one target; its errors name the fields that the client sent."""

    def __init__(
        self,
        encoder: PromptEncoder,
        compiler: GrammarCompiler,
        model: ModelLimits,
        adapters: Mapping[str, str | None],
        *,
        max_n: int,
    ) -> None:
        """`adapters` has the LoRA adapter, if any, by each model name of a request."""
        self.model = model
        self._encoder, self._compiler = encoder, compiler
        self._adapters, self._max_n = adapters, max_n

    async def read(self, request: CompletionRequest | Conversation, salt: str | None) -> ReadRequest:
        """Return what a request asks of the engine; the grammar is compiled for the salt.

        Raises:
            RequestError: a field's value is refused, or the prompt too long.
            CapacityError: the grammar was not compiled in time.
        """
        try:
            asked = request if isinstance(request, CompletionRequest) else request.to_chat()
            return await self._read(asked, salt)
        except RequestError as error:
            raise renamed(error, request.CHAT_FIELDS) from error

    async def _read(self, asked: CompletionRequest | ChatCompletionRequest, salt: str | None) -> ReadRequest:
        params = sampling_params(asked, self.model, max_n=self._max_n)
        params = replace(params, adapter=self._adapters.get(asked.model or ""))
        form, begun, echoes, room = None, "", [], self.model.max_model_len
        if isinstance(asked, CompletionRequest):
            source = asked.text_source()
            prompts, params = fit(params, asked, await self._prompts(asked), self.model)
            echoed = prompts if asked.echo else []
            echoes = [await self._encoder.decode_tokens(prompt, skip_special_tokens=True) for prompt in echoed]
        else:
            form = self._encoder.form
            source = asked.grammar_source(form.tool_form if form else None)
            prompts, params = fit(params, asked, [await self._encoder.encode_chat(asked, room)], self.model)
            if form is not None:
                begun = await self._encoder.answer_begun(asked, prompts[0])
                params = replace(params, mark_token_ids=list(form.mark_token_ids))
                source = source and replace(source, thoughts=form.thoughts_after(begun))
        predicted = await self._encoder.encode_prediction(asked.prediction, room)
        if source is not None:
            params = replace(params, grammar=await self._compiler.compile(source, salt))
        return ReadRequest(asked, prompts, params, predicted, form, begun, echoes)

    async def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        prompt: Any = request.prompt
        entries = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        check_token_ids([entry for entry in entries if not isinstance(entry, str)], self.model, "prompt")
        adds_special = request.add_special_tokens is not False
        encode = partial(self._encoder.encode, max_model_len=self.model.max_model_len, adds_special_tokens=adds_special)
        return [await encode(entry) if isinstance(entry, str) else entry for entry in entries]
