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
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.handle import DeploymentHandle

from deployments.anthropic.messages_request import CountTokensRequest, MessagesRequest
from deployments.anthropic.messages_writer import InputTokens, MessageBody, MessagesError, MessagesWriter
from deployments.config import IngressConfig
from deployments.guard.admission import Admission
from deployments.ingress.answer import Answer
from deployments.ingress.draining import end_at_shutdown
from deployments.ingress.event_ids import event_ids
from deployments.ingress.health import Health, add_health_routes, health_of
from deployments.ingress.routes import Arrival, Arrived, answers, json_response, make_api
from deployments.ingress.server_info import ModelCard, ModelList, Version, announcement, fingerprint, version_of
from deployments.observe.logs import in_background, limited_start, set_log_format
from deployments.observe.metrics import ReplicaMetrics, exposition, in_scope
from deployments.observe.tracing import traceparent
from deployments.openai.chat import ChatCompletion, ChatCompletionRequest, ChatWriter
from deployments.openai.completions import Completion, CompletionRequest, CompletionWriter
from deployments.openai.responses_request import ResponsesRequest, renamed
from deployments.openai.responses_writer import Response as ResponsesBody
from deployments.openai.responses_writer import ResponsesWriter
from deployments.openai.sampling_fields import GenerationRequest
from deployments.openai.structured_output import GrammarSource
from deployments.openai.writer import Reply, Writer
from deployments.page.demo import add_demo
from deployments.page.page import add_page
from deployments.prompts.encoder import LONG_CHARS, PromptEncoder
from deployments.prompts.grammar_compiler import GrammarCompiler
from deployments.prompts.parameters import check_token_ids, fit, sampling_params
from deployments.prompts.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens
from deployments.ray_internals import bind_replica
from deployments.routing.client import ServeRouters
from deployments.routing.loads import problem_of
from deployments.wire import Description, Generation, ModelLimits, target_id
from engine.config import SEEDED_RULES, ModelInfo
from engine.errors import CapacityError, RequestError, UnknownModelError
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.sampling.grammar import Grammars

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

WHOLE_INTERVAL_S = 2.0
"""How often a Router sends tokens of an unstreamed response, from which another Router can resume it."""


class Ingress:
    """One HTTP replica. Its public methods answer the routes; their RequestErrors name the field, value and limit."""

    async def __init__(  # type: ignore[misc]
        self, config: IngressConfig, routers: DeploymentHandle[Any] | ServeRouters, *, keys: tuple[str, ...] = ()
    ) -> None:
        """Load the tokenizer; requests wait until the first Router has loaded its models."""
        set_log_format(config.log_format)
        self.config, self._keys = config, keys
        if not isinstance(routers, DeploymentHandle):
            await self._start(routers)
            return
        bind_replica()
        with limited_start(config.start_timeout_s):
            host, target = ray.util.get_node_ip_address(), target_id(config.target)
            client = await ServeRouters.open(routers, host, target=target, has_pool=self.config.draft_pool)
            self._draining = in_background(end_at_shutdown(client.end_all), name="end streams at a shutdown")
            await self._start(client)

    async def _start(self, routers: ServeRouters) -> None:
        self._routers = routers
        self.admission = Admission(routers)
        self._target = open_model(self.config.target)
        self._encoder = PromptEncoder(await asyncio.to_thread(lambda: self._target.tokenizer))
        self._started = int(time.time())
        self._fingerprint = ""
        self._info: ModelInfo | None = None
        self._serving = asyncio.create_task(self._wait_for_routers(), name="waiting for Routers")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application; Serve calls this when the replica starts."""
        api = make_api(self.config, self._keys, self.admission)
        post, get = partial(api.post, response_model=None), partial(api.get, response_model=None)
        post("/v1/completions", responses=answers(Completion, streams=True))(self.completions)
        post("/v1/chat/completions", responses=answers(ChatCompletion, streams=True))(self.chat_completions)
        post("/v1/responses", responses=answers(ResponsesBody, streams=True))(self.responses)
        errors = partial(answers, error=MessagesError)
        post("/v1/messages", responses=errors(MessageBody, streams=True))(self.messages)
        post("/v1/messages/count_tokens", responses=errors(InputTokens))(self.count_tokens)
        post("/tokenize", responses=answers(Tokens))(self.tokenize)
        post("/detokenize", responses=answers(Text))(self.detokenize)
        get("/v1/models", responses=answers(ModelList))(self.models)
        get("/v1/models/{name:path}", responses=answers(ModelCard))(self.model)
        add_health_routes(api, self._health)
        if (page := self.config.page) != "off":
            add_page(api, page)
        if page == "demo":
            add_demo(api, self._routers.kill, has_keys=bool(self._keys))
        get("/version", responses=answers(Version))(self.version)
        get("/metrics", responses={200: {"content": {"text/plain": {}}}})(self.metrics)
        return api

    async def _wait_for_routers(self) -> Description:
        description = await self._routers.describe()
        self._info = info = description.target
        self._fingerprint = fingerprint(self.config, info, self._target.tokenizer)
        grammars = Grammars(self._target, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        self._compiler = GrammarCompiler(grammars)
        logger.info(announcement(self.config, description, await self._routers.base_url()))
        return description

    async def _served(self, model: str | None) -> Description:
        """Wait for the models, for as long as a request may take; refuse another model's name."""
        if model is not None and model not in self.config.adapters:
            names = ", ".join(map(repr, self.config.adapters))
            raise UnknownModelError(f"model is {model[:100]!r}, this server has {names}", "model")
        await asyncio.wait([self._serving], timeout=self.config.limits.request_timeout_s)
        if not self._serving.done():
            raise CapacityError("the models are still being loaded")
        return self._serving.result()

    async def completions(self, request: CompletionRequest, arrival: Arrived) -> Response:
        """Continue a prompt."""
        limits = (await self._served(request.model)).limits
        params = self._params(request, limits, request.model)
        source = request.text_source()
        prompts, params = fit(params, request, await self._prompts(request, limits), limits)
        echoed = prompts if request.echo else []
        echoes = [await self._encoder.decode_tokens(prompt, skip_special_tokens=True) for prompt in echoed]
        reply = await self._reply("cmpl-", prompts, request, limits)
        return await self._answer(CompletionWriter(reply, request, echoes), params, source, arrival)

    async def chat_completions(self, request: ChatCompletionRequest, arrival: Arrived) -> Response:
        """Answer a conversation."""
        return await self._converse(request, "chatcmpl-", ChatWriter, arrival)

    async def responses(self, request: ResponsesRequest, arrival: Arrived) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        writer = partial(ResponsesWriter, responses_request=request)
        return await self._converse(request, "resp_", writer, arrival)

    async def messages(self, request: MessagesRequest, arrival: Arrived) -> Response:
        """Answer a conversation, in Anthropic's form."""
        return await self._converse(request, "msg_", MessagesWriter, arrival)

    async def count_tokens(self, request: CountTokensRequest) -> Response:
        """Return the number of tokens of a conversation in Anthropic's form."""
        room = (await self._served(request.model)).limits.max_model_len
        return json_response(InputTokens(input_tokens=len(await self._encoder.encode_chat(request.to_chat(), room))))

    async def models(self) -> Response:
        """List the served model and its adapters."""
        names = dict.fromkeys(adapter or self.config.model_name for adapter in self.config.adapters.values())
        return json_response(ModelList(object="list", data=[await self._card(name) for name in names]))

    async def model(self, name: str) -> Response:
        """Describe the served model."""
        return json_response(await self._card(name))

    async def _card(self, name: str) -> ModelCard:
        served = await self._served(name)
        return ModelCard(
            id=self.config.adapters[name] or self.config.model_name,
            object="model",
            created=self._started,
            owned_by="paceline",
            root=Path(self.config.target.path).name,  # where it lies is the operator's affair
            max_model_len=served.limits.max_model_len,
        )

    async def tokenize(self, request: TokenizeRequest) -> Response:
        """Return the token ids of a text or a conversation."""
        room = (await self._served(request.model)).limits.max_model_len
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        if request.messages is not None:
            ids = await self._encoder.encode_chat(request, room)
        else:
            adds_special = request.add_special_tokens is not False
            ids = await self._encoder.encode(request.prompt or "", room, adds_special_tokens=adds_special)
        extra = {"token_strs": await self._encoder.decode_each(ids)} if request.return_token_strs else {}
        return json_response(Tokens(count=len(ids), max_model_len=room, tokens=ids, **extra))

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        served = await self._served(request.model)
        if len(request.tokens) > (limit := served.limits.max_model_len):
            raise RequestError(f"tokens holds {len(request.tokens):,} ids, the context length is {limit:,}", "tokens")
        check_token_ids([request.tokens], served.limits, "tokens")
        return json_response(Text(prompt=await self._encoder.decode_tokens(request.tokens)))

    async def version(self) -> Response:
        """Return the server's version."""
        return json_response(version_of(self.config.target.device, self._info, self._fingerprint))

    async def metrics(self, request: Request, scope: str = "all") -> Response:
        """Return Prometheus metrics of all replicas, or of those on the URL's node (local), each with its own label."""
        collected = in_scope(await self._routers.collect(), scope, request.url.hostname or "")
        return Response(exposition(collected, self.config.model_name), media_type=CONTENT_TYPE_LATEST)

    def _health(self) -> Health:
        routers = self._routers.heard()
        return health_of(routers, problem_of(routers) if self._serving.done() else "the models are still being loaded")

    async def check_health(self) -> None:
        """Serve's health check: replace a replica that failed to learn which models are served."""
        if self._serving.done():
            self._serving.result()

    async def collect(self) -> ReplicaMetrics:
        """Return this replica's metrics, for the Ingress that answers `/metrics`."""
        return self._routers.collect_here()

    def _params(
        self, request: CompletionRequest | ChatCompletionRequest, limits: ModelLimits, model: str | None
    ) -> SamplingParams:
        params = sampling_params(request, limits, max_n=self.config.limits.max_n)
        return replace(params, adapter=self.config.adapters.get(model or ""))

    async def _prompts(self, request: CompletionRequest, model: ModelLimits) -> list[list[int]]:
        prompt = request.prompt
        entries: Any = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        check_token_ids([entry for entry in entries if not isinstance(entry, str)], model, "prompt")
        adds_special = request.add_special_tokens is not False
        encode = partial(self._encoder.encode, max_model_len=model.max_model_len, adds_special_tokens=adds_special)
        return [await encode(entry) if isinstance(entry, str) else entry for entry in entries]

    async def _converse(
        self,
        request: ChatCompletionRequest | ResponsesRequest | MessagesRequest,
        prefix: str,
        writer: Callable[..., Writer],
        arrival: Arrival,
    ) -> Response:
        """Answer a request as a chat completion; errors name the fields that the client sent."""
        limits = (await self._served(request.model)).limits
        try:
            chat = request if isinstance(request, ChatCompletionRequest) else request.to_chat()
            params = self._params(chat, limits, request.model)
            form = self._encoder.form
            source = chat.grammar_source(form.tool_form if form else None)
            prompts = [await self._encoder.encode_chat(chat, limits.max_model_len)]
            prompts, params = fit(params, chat, prompts, limits)
            end = "" if form is None else await self._encoder.answer_begun(chat, prompts[0])
            begin = partial(writer, await self._reply(prefix, prompts, chat, limits), chat, form, end)
            # A long answer that the client has begun takes time to read.
            answer = await asyncio.to_thread(begin) if len(end) > LONG_CHARS else begin()
            if form is not None:
                params = replace(params, mark_token_ids=list(form.mark_token_ids))
                source = source and replace(source, thoughts=form.thoughts_after(end))
            return await self._answer(answer, params, source, arrival)
        except RequestError as error:
            raise renamed(error, request.CHAT_FIELDS) from error

    async def _reply(
        self, prefix: str, prompts: list[list[int]], request: GenerationRequest, model: ModelLimits
    ) -> Reply:
        return Reply(
            id=prefix + secrets.token_hex(16),
            model=self.config.adapters.get(request.model or "") or self.config.model_name,
            fingerprint=self._fingerprint,
            prompts=prompts,
            token_bytes=self._encoder.token_bytes,
            num_speculative_tokens=model.num_speculative_tokens,
            predicted_token_ids=await self._encoder.encode_prediction(request.prediction, model.max_model_len),
        )

    async def _answer(
        self, writer: Writer, params: SamplingParams, source: GrammarSource | None, arrival: Arrival
    ) -> Response:
        """Submit a request whose text must match `source`, and answer it, from the client's last event on."""
        request, owner, salt = writer.request, arrival.preparation.owner, writer.request.cache_salt
        if owner and not self.config.share_between_keys:
            salt = f"{owner}/{salt or ''}"  # a salt that other owners cannot send
        if params.learning_group is not None:
            params = replace(params, learning_group=owner)
        if source is not None:
            params = replace(params, grammar=await self._compiler.compile(source, salt))
        ids, seed = event_ids(writer, params, arrival.last_event_id, is_seeded=self.config.verification in SEEDED_RULES)
        generation = Generation(
            # Not the answer's id: another Ingress may have begun the answer.
            request_id=secrets.token_hex(16) if arrival.last_event_id else writer.reply.id,
            prompts=writer.reply.prompts,
            params=params,
            timeout_s=self.config.limits.request_timeout_s,
            cache_salt=salt,
            interval_s=self.config.stream_interval_s if request.stream else WHOLE_INTERVAL_S,
            gathers_first=not request.stream,
            drawn_seed=seed,
            traceparent=traceparent(),
            predicted_token_ids=writer.reply.predicted_token_ids,
            priority=request.priority or 0,
            owner=owner,
        )
        outputs = self._routers.generate(generation)
        self.admission.submitted(arrival.preparation)
        return await Answer(writer, outputs, ids, hides_token=request.max_tokens == 0).begin()
