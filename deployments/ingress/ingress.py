"""Ingress: HTTP in, text out. Parses, checks and tokenizes requests, and writes what the Router streams back."""

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.config import AppConfig, group_config
from deployments.ingress.answer import Answer
from deployments.ingress.prompts import PromptEncoder
from deployments.ingress.router_client import RouterHandle, ServeRouters
from deployments.ingress.routes import make_api
from deployments.metrics import exposition
from deployments.openai import bodies as r
from deployments.openai.chat_writer import ChatWriter
from deployments.openai.parameters import ModelLimits, check_token_ids, sampling_params
from deployments.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from deployments.openai.responses import CHAT_FIELDS, ResponsesRequest
from deployments.openai.responses_writer import ResponsesWriter
from deployments.openai.structured_output import Formats
from deployments.openai.writer import CompletionWriter, ResponseWriter
from deployments.router.generation import Generation, without_tokens
from deployments.router.router import Description
from engine.errors import CapacityError, RequestError, UnknownModelError
from engine.models.tokenizer import load_tokenizer
from engine.sampling.grammar import Grammars

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

START_GRACE_S = 1.0
"""How long a request may wait for the models before it gets 503."""


class Ingress:
    """One HTTP replica: a tokenizer, the limits, and a handle to the Routers."""

    async def __init__(  # type: ignore[misc]
        self,
        config: AppConfig,
        routers: DeploymentHandle[Any] | RouterHandle,
        *,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Load the tokenizer; requests get 503 until the first Router has loaded its models."""
        self.config = config
        self._keys = keys
        self._routers: RouterHandle = ServeRouters(routers) if isinstance(routers, DeploymentHandle) else routers
        self._encoder = PromptEncoder(await asyncio.to_thread(load_tokenizer, group_config(config).target))
        self._started = int(time.time())
        self._serving = asyncio.create_task(self._wait_for_routers(), name="waiting for Routers")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this when the replica starts."""
        return make_api(self, limits=self.config.limits, keys=self._keys)

    async def _wait_for_routers(self) -> Description:
        description = await self._routers.describe()
        info = description.target
        grammars = Grammars(
            group_config(self.config).target, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
        )
        self._formats = Formats(grammars, self.config.limits, self._encoder.tool_form)
        _announce(self.config, description, await self._routers.base_url())
        return description

    async def _describe(self) -> Description:
        """Return what is served.

        Raises:
            CapacityError: the models are still being loaded.
        """
        await asyncio.wait([self._serving], timeout=START_GRACE_S)
        if not self._serving.done():
            raise CapacityError("the models are still being loaded")
        return self._serving.result()

    async def complete(self, request: CompletionRequest) -> Answer:
        """Check and queue nothing yet: return the answer to a completion request.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        prompts = await self._prompts(request, served.limits)
        return await self._answer(request, prompts, "cmpl-", served.limits, CompletionWriter)

    async def chat(self, request: ChatCompletionRequest) -> Answer:
        """Return the answer to a chat request.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        room = served.limits.max_model_len
        prompt = await self._encoder.run(self._encoder.encode_chat, request.messages, room, request.offered_tools)
        return await self._answer(request, [prompt], "chatcmpl-", served.limits, ChatWriter)

    async def respond(self, request: ResponsesRequest) -> Answer:
        """Return the answer to a request in the newer shape.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        chat = request.to_chat()
        try:
            prompt = await self._encoder.run(self._encoder.encode_chat, chat.messages, served.limits.max_model_len)
            return await self._answer(chat, [prompt], "resp_", served.limits, partial(ResponsesWriter, asked=request))
        except RequestError as error:
            raise _in_newer_words(error) from error

    async def models(self) -> r.ModelList:
        """Return the served model."""
        card = r.ModelCard(
            id=self.config.model_name,
            object="model",
            created=self._started,
            owned_by="paceline",
            root=self.config.pair.target.path,
            max_model_len=(await self._describe()).limits.max_model_len,
        )
        return r.ModelList(object="list", data=[card])

    async def tokenize(self, request: TokenizeRequest) -> r.Tokens:
        """Return the token ids of a text or a conversation.

        Raises:
            RequestError: neither or both were sent.
        """
        room = (await self._describe()).limits.max_model_len
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if request.messages is not None:
            ids = await self._encoder.run(self._encoder.encode_chat, request.messages, room)
        else:
            ids = await self._encoder.run(self._encoder.encode, request.prompt, room)
        extra = {"token_strs": self._encoder.token_texts(ids)} if request.return_token_strs else {}
        return r.Tokens(count=len(ids), max_model_len=room, tokens=ids, **extra)

    async def detokenize(self, request: DetokenizeRequest) -> r.Text:
        """Return the text of token ids.

        Raises:
            RequestError: an id that the model does not have, or more of them than its context holds.
        """
        served = await self._describe()
        self._check_model(request.model)
        if len(request.tokens) > (most := served.limits.max_model_len):
            raise RequestError(f"tokens holds {len(request.tokens):,} ids, the context length is {most:,}", "tokens")
        check_token_ids([request.tokens], served.limits, "tokens")
        return r.Text(prompt=await self._encoder.run(self._encoder.decode, request.tokens))

    async def check(self) -> None:
        """Raise unless a Router makes progress."""
        await self._describe()
        await self._routers.check_progress()

    async def metrics(self) -> bytes:
        """Return the metrics of all Routers, summed."""
        return exposition(await self._routers.collect())

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.config.model_name:
            raise UnknownModelError(f"model is {model[:100]!r}, this server has {self.config.model_name!r}", "model")

    async def _prompts(self, request: CompletionRequest, model: ModelLimits) -> list[list[int]]:
        """Return the prompts as token ids."""
        prompt = request.prompt
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        if len(several) > (limit := self.config.limits.max_prompts):
            raise RequestError(f"prompt has {len(several)} entries, at most {limit} are allowed", "prompt")
        room = model.max_model_len
        prompts: list[list[int]] = []
        for one in several:
            is_text = isinstance(one, str)
            prompts.append(await self._encoder.run(self._encoder.encode, one, room) if is_text else list(one))  # type: ignore[arg-type]
        if any(not ids for ids in prompts):
            raise RequestError("prompt is empty; it must have at least one token", "prompt")
        check_token_ids(prompts, model, "prompt")
        return prompts

    async def _answer(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        prompts: list[list[int]],
        kind: str,
        model: ModelLimits,
        write: Callable[..., ResponseWriter],
    ) -> Answer:
        params = sampling_params(request, prompts, model, self.config.limits)
        params = replace(params, grammar=await self._formats.grammar(request))
        request_id = kind + secrets.token_hex(16)
        speculative = request.speculative
        writer = write(
            id=request_id,
            model=self.config.model_name,
            request=request,
            prompts=prompts,
            encoder=self._encoder,
            num_speculative_tokens=model.num_speculative_tokens,
            metrics_level=(speculative and speculative.metrics) or self.config.per_request_spec_decode_metrics,
        )
        generation = Generation(
            request_id=request_id,
            prompts=prompts,
            params=params,
            timeout_s=self.config.limits.request_timeout_s,
            cache_salt=request.cache_salt,
            interval_s=self.config.stream_interval_s if request.stream else math.inf,
        )
        rounds = self._routers.generate(generation)
        return Answer(writer, without_tokens(rounds) if request.max_tokens == 0 else rounds)


def _in_newer_words(error: RequestError) -> RequestError:
    """Return an error about a chat request with its fields named as in a responses request."""
    message = str(error)
    for old, new in CHAT_FIELDS.items():
        message = re.sub(rf"\b{re.escape(old)}\b", new, message)
    return type(error)(message, CHAT_FIELDS.get(error.param or "", error.param))


def _announce(config: AppConfig, description: Description, base_url: str) -> None:
    """Say what is served, where, and how to try it."""
    target, draft = description.target, description.draft
    pair = f"target {target.name} ({target.num_parameters / 1e6:.1f} M, {target.dtype}, {target.device})"
    if config.tensor_parallel_size > 1:
        pair += f" over {config.tensor_parallel_size} ranks"
    if draft is None:
        pair += ", no draft"
    else:
        pair += f", draft {draft.name} ({draft.num_parameters / 1e6:.1f} M, {draft.dtype}, {draft.device})"
    curl = (
        f"curl -s {base_url}/v1/completions -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{config.model_name}", "prompt": "This PEP proposes", "max_tokens": 48}}'"""
    )
    logger.info(
        "serving %s; draft length %d; %s\n  %s",
        pair,
        description.limits.num_speculative_tokens,
        base_url,
        curl,
    )
