"""Ingress: HTTP in, text out. Checks and tokenizes requests, sends them to a Router, writes its tokens as text."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.config import AppConfig
from deployments.grammar_check.compiler import GrammarCompiler
from deployments.ingress.admission import Admission, submitted
from deployments.ingress.answer import Answer
from deployments.ingress.health import Health, health_of
from deployments.ingress.outline import Bounds
from deployments.ingress.parameters import check_token_ids, sampling_params, truncated, within_room
from deployments.ingress.prompts import PromptEncoder
from deployments.ingress.readiness import Readiness
from deployments.ingress.router_client import RouterHandle, ServeRouters
from deployments.ingress.routes import make_api
from deployments.ingress.server_info import ModelCard, ModelList, announcement, fingerprint
from deployments.ingress.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens
from deployments.json_log import set_log_format
from deployments.loopback import bind_replica
from deployments.metrics import ReplicaMetrics, exposition
from deployments.openai.chat import ChatCompletionRequest, ChatWriter
from deployments.openai.completions import CompletionRequest, CompletionWriter
from deployments.openai.responses.request import ResponsesRequest, with_responses_names
from deployments.openai.responses.writer import ResponsesWriter
from deployments.openai.structured_output import GrammarSource
from deployments.openai.writer import Writer
from deployments.router.generation import Description, Generation, ModelLimits, target_id
from deployments.starting import watched_start
from engine.errors import CapacityError, RequestError, UnknownModelError
from engine.models.tokenizer import load_tokenizer
from engine.sampling.grammar import Grammars
from engine.sampling.params import SamplingParams

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

WHOLE_INTERVAL_S = 2.0
"""How often a Router sends tokens of a response that is not streamed; if it is lost, another one goes on after them."""

WriterFactory = Callable[..., Writer]


class Ingress:
    """One HTTP replica: a tokenizer, the limits, and a handle to the Routers."""

    async def __init__(  # type: ignore[misc]
        self,
        config: AppConfig,
        routers: DeploymentHandle[Any] | RouterHandle,
        *,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Load the tokenizer; requests wait until the first Router has loaded its models."""
        set_log_format(config.log_format)
        self.config, self._keys = config, keys
        if not isinstance(routers, DeploymentHandle):
            await self._start(routers)
            return
        bind_replica()
        with watched_start(config.hang_timeout_s, config.start_timeout_s):
            host, target = ray.util.get_node_ip_address(), target_id(config.pair.target)
            await self._start(await ServeRouters.open(routers, host, config.model_name, target=target))

    async def _start(self, routers: RouterHandle) -> None:
        self._routers = routers
        self.admission = Admission(routers)
        self._readiness = Readiness(routers.states)
        self._encoder = PromptEncoder(await asyncio.to_thread(load_tokenizer, self.config.pair.target))
        self._started = int(time.time())
        self._fingerprint = fingerprint(self.config)
        self._serving = asyncio.create_task(self._wait_for_routers(), name="waiting for Routers")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application; Serve calls this when the replica starts."""
        return make_api(self, config=self.config, keys=self._keys)

    @property
    def device(self) -> str:
        """The `device` setting."""
        return self.config.pair.device

    def bounds(self) -> Bounds:
        """Return how much a body may hold; token ids are counted from when the models are known."""
        is_known = self._serving.done() and not self._serving.cancelled() and self._serving.exception() is None
        max_model_len = self._serving.result().limits.max_model_len if is_known else None
        return Bounds.of(self.config.limits, max_model_len)

    async def _wait_for_routers(self) -> Description:
        description = await self._routers.describe()
        info = description.target
        grammars = Grammars(self.config.pair.target, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        self._compiler = GrammarCompiler(grammars, self.config.limits)
        logger.info(announcement(self.config, description, await self._routers.base_url()))
        return description

    async def _describe(self) -> Description:
        """Return what is served; wait for the models for as long as a request may take.

        Raises:
            CapacityError: the models are still being loaded.
        """
        await asyncio.wait([self._serving], timeout=self.config.limits.request_timeout_s)
        if not self._serving.done():
            raise CapacityError("the models are still being loaded")
        return self._serving.result()

    async def complete(self, request: CompletionRequest) -> Answer:
        """Return the answer to a completion request.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        params = sampling_params(request, served.limits, self.config.limits)
        source = request.text_source()
        prompts = await self._prompts(request, served.limits)
        params = within_room(params, request, prompts, served.limits, self.config.limits)
        decode = partial(self._encoder.decode_tokens, skip_special_tokens=True)
        write = partial(CompletionWriter, echoes=[await decode(prompt) for prompt in prompts if request.echo])
        return await self._answer(request, prompts, params, served.limits, source, id_prefix="cmpl-", write=write)

    async def chat(self, request: ChatCompletionRequest) -> Answer:
        """Return the answer to a chat completion request.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        write = partial(ChatWriter, tool_form=self._encoder.tool_form)
        return await self._answer_chat(request, served.limits, id_prefix="chatcmpl-", write=write)

    async def respond(self, request: ResponsesRequest) -> Answer:
        """Return the answer to a responses request, which is a chat completion with other names.

        Raises:
            RequestError: naming the field, the value and the limit.
        """
        served = await self._describe()
        self._check_model(request.model)
        write = partial(ResponsesWriter, responses_request=request, tool_form=self._encoder.tool_form)
        try:
            return await self._answer_chat(request.to_chat(), served.limits, id_prefix="resp_", write=write)
        except RequestError as error:
            raise with_responses_names(error) from error

    async def models(self) -> ModelList:
        """Return the list of served models, which has one entry."""
        return ModelList(object="list", data=[await self.model(self.config.model_name)])

    async def model(self, name: str) -> ModelCard:
        """Return the served model.

        Raises:
            UnknownModelError: it has another name.
        """
        self._check_model(name)
        return ModelCard(
            id=self.config.model_name,
            object="model",
            created=self._started,
            owned_by="paceline",
            root=Path(self.config.pair.target.path).name,  # where it lies is the operator's affair
            max_model_len=(await self._describe()).limits.max_model_len,
        )

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Return the token ids of a text or a conversation.

        Raises:
            RequestError: neither or both were sent.
        """
        room = (await self._describe()).limits.max_model_len
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if request.messages is not None:
            rendering = request.rendering(adds_special_tokens=request.add_special_tokens)
            ids = await self._encoder.encode_chat(request.messages, room, rendering)
        else:
            adds_special = request.add_special_tokens is not False
            ids = await self._encoder.encode(request.prompt or "", room, adds_special_tokens=adds_special)
        extra = {"token_strs": await self._encoder.decode_each(ids)} if request.return_token_strs else {}
        return Tokens(count=len(ids), max_model_len=room, tokens=ids, **extra)

    async def detokenize(self, request: DetokenizeRequest) -> Text:
        """Return the text of token ids.

        Raises:
            RequestError: an id that the model does not have, or more of them than its context holds.
        """
        served = await self._describe()
        self._check_model(request.model)
        if len(request.tokens) > (limit := served.limits.max_model_len):
            raise RequestError(f"tokens holds {len(request.tokens):,} ids, the context length is {limit:,}", "tokens")
        check_token_ids([request.tokens], served.limits, "tokens")
        return Text(prompt=await self._encoder.decode_tokens(request.tokens))

    def health(self) -> Health:
        """Return what this Ingress knows, without waiting."""
        reason = self._readiness.problem if self._serving.done() else "the models are still being loaded"
        return health_of(self._readiness.routers, reason)

    async def check_health(self) -> None:
        """Serve's health check: a replica that could not find out what is served never will, and is replaced."""
        if self._serving.done():
            self._serving.result()

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas of the application, as far as they answer."""
        return exposition(await self._routers.collect())

    async def collect(self) -> ReplicaMetrics:
        """Return this replica's metrics, for whichever Ingress is asked for all."""
        return self._routers.collect_here()

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.config.model_name:
            raise UnknownModelError(f"model is {model[:100]!r}, this server has {self.config.model_name!r}", "model")

    async def _prompts(self, request: CompletionRequest, model: ModelLimits) -> list[list[int]]:
        """Return the prompts as token ids."""
        prompt = request.prompt
        entries: Any = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        room = model.max_model_len
        check_token_ids([entry for entry in entries if not isinstance(entry, str)], model, "prompt")
        max_ids = room if request.truncate_prompt_tokens is None else None
        adds_special = request.add_special_tokens is not False
        encode = partial(self._encoder.encode, adds_special_tokens=adds_special, max_ids=max_ids)
        prompts = [await encode(entry, room) if isinstance(entry, str) else list(entry) for entry in entries]
        return [truncated(prompt, request, model) for prompt in prompts]

    async def _answer_chat(
        self, request: ChatCompletionRequest, model: ModelLimits, *, id_prefix: str, write: WriterFactory
    ) -> Answer:
        params = sampling_params(request, model, self.config.limits)
        source = request.grammar_source(self._encoder.tool_form)
        room = model.max_model_len
        rendering = request.rendering(adds_special_tokens=request.add_special_tokens)
        max_ids = room if request.truncate_prompt_tokens is None else None
        prompt = await self._encoder.encode_chat(request.messages, room, rendering, max_ids=max_ids)
        prompt = truncated(prompt, request, model)
        params = within_room(params, request, [prompt], model, self.config.limits)
        return await self._answer(request, [prompt], params, model, source, id_prefix=id_prefix, write=write)

    async def _answer(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        model: ModelLimits,
        source: GrammarSource | None,
        *,
        id_prefix: str,
        write: WriterFactory,
    ) -> Answer:
        """Return the answer to prompts whose text must match a grammar source, if there is one."""
        if source is not None:
            params = replace(params, grammar=await self._compiler.compile(source))
        request_id = id_prefix + secrets.token_hex(16)
        speculative = request.speculative
        writer = write(
            id=request_id,
            model=self.config.model_name,
            request=request,
            prompts=prompts,
            decoder=self._encoder,
            num_speculative_tokens=model.num_speculative_tokens,
            metrics_level=(speculative and speculative.metrics) or self.config.per_request_spec_decode_metrics,
            fingerprint=self._fingerprint,
        )
        generation = Generation(
            request_id=request_id,
            prompts=prompts,
            params=params,
            timeout_s=self.config.limits.request_timeout_s,
            cache_salt=request.cache_salt,
            interval_s=self.config.stream_interval_s if request.stream else WHOLE_INTERVAL_S,
            gathers_first=not request.stream,
        )
        outputs = self._routers.generate(generation)
        submitted()
        return Answer(writer, outputs, hides_token=request.max_tokens == 0)
