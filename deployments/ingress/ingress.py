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
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.anthropic.messages_request import CountTokensRequest, MessagesRequest
from deployments.anthropic.messages_writer import InputTokens, MessageBody, MessagesError, MessagesWriter
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
from deployments.openai.responses_request import ResponsesRequest
from deployments.openai.responses_writer import Response as ResponsesBody
from deployments.openai.responses_writer import ResponsesWriter
from deployments.openai.writer import Reply, Writer
from deployments.page.demo import add_demo
from deployments.page.page import add_page
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.grammar_compiler import GrammarCompiler
from deployments.prompts.parameters import check_token_ids
from deployments.prompts.reader import ReadRequest, RequestReader
from deployments.prompts.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens
from deployments.ray_internals import bind_replica
from deployments.records.record import GeneratingRequest, Record, Recording
from deployments.records.record_log import RecordLog
from deployments.records.record_reader import AuditBody, RecordReader
from deployments.routing.client import ServeRouters
from deployments.routing.loads import problem_of
from deployments.sections import IngressConfig
from deployments.wire import Description, Generation, target_id
from engine.config import SEEDED_RULES, ModelInfo
from engine.errors import CapacityError, RequestError, UnknownModelError
from engine.models.registry import open_model
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
            await self._start(routers, "local")
            return
        bind_replica()
        with limited_start(config.start_timeout_s):
            host, target = ray.util.get_node_ip_address(), target_id(config.target)
            client = await ServeRouters.open(routers, host, target=target, has_pool=self.config.draft_pool)
            self._draining = in_background(end_at_shutdown(client.end_all), name="end streams at a shutdown")
            await self._start(client, serve.get_replica_context().replica_tag)

    async def _start(self, routers: ServeRouters, name: str) -> None:
        self._routers = routers
        self._records = RecordLog(self.config.record, name) if self.config.record else None
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
        post("/v1/audit", responses=answers(AuditBody))(self.audit)
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
        compiler, max_n = GrammarCompiler(grammars), self.config.limits.max_n
        self._reader = RequestReader(self._encoder, compiler, description.limits, self.config.adapters, max_n=max_n)
        self._record_reader = RecordReader(self._reader, self._encoder, info.eos_token_ids)
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

        def begin(reply: Reply, read: ReadRequest) -> Writer:
            return CompletionWriter(reply, request, read.echoes)

        return await self._answer(request, arrival, "cmpl-", begin)

    async def chat_completions(self, request: ChatCompletionRequest, arrival: Arrived) -> Response:
        """Answer a conversation."""
        return await self._converse(request, arrival, "chatcmpl-", ChatWriter)

    async def responses(self, request: ResponsesRequest, arrival: Arrived) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        return await self._converse(request, arrival, "resp_", partial(ResponsesWriter, responses_request=request))

    async def messages(self, request: MessagesRequest, arrival: Arrived) -> Response:
        """Answer a conversation, in Anthropic's form."""
        return await self._converse(request, arrival, "msg_", MessagesWriter)

    async def audit(self, record: Record, arrival: Arrived) -> Response:
        """Say where this server would have written another token than a recorded answer has."""
        request = record.request()
        await self._served(request.model)
        salt = self._salt(request, arrival)
        answer = await self._record_reader.read(record, request, salt)
        generation = answer.generation(
            f"audit-{secrets.token_hex(16)}",
            self.config.limits.request_timeout_s,
            cache_salt=salt,
            traceparent=traceparent(),
            owner=arrival.preparation.owner,
        )
        outputs = self._routers.generate(generation)
        self.admission.submitted(arrival.preparation)
        findings = await answer.findings(outputs)
        return json_response(answer.body(findings, self._fingerprint, self._encoder.token_bytes))

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

    async def _converse(
        self, request: GeneratingRequest, arrival: Arrival, prefix: str, writer: Callable[..., Writer]
    ) -> Response:
        return await self._answer(
            request, arrival, prefix, lambda reply, read: writer(reply, read.request, read.form, read.begun)
        )

    def _salt(self, request: GeneratingRequest, arrival: Arrival) -> str | None:
        """Return the salt of a request's caches; with an owner, it is one that other owners cannot send."""
        owner = "" if self.config.share_between_keys else arrival.preparation.owner
        return f"{owner}/{request.cache_salt or ''}" if owner else request.cache_salt

    async def _answer(
        self, request: GeneratingRequest, arrival: Arrival, prefix: str, begin: Callable[[Reply, ReadRequest], Writer]
    ) -> Response:
        """Answer a request, from the client's last event on."""
        await self._served(request.model)
        salt = self._salt(request, arrival)
        read = await self._reader.read(request, salt)
        reply = Reply(
            id=prefix + secrets.token_hex(16),
            model=self.config.adapters.get(request.model or "") or self.config.model_name,
            fingerprint=self._fingerprint,
            prompts=read.prompts,
            token_bytes=self._encoder.token_bytes,
            num_speculative_tokens=self._reader.model.num_speculative_tokens,
            predicted_token_ids=read.predicted_token_ids,
        )
        writer, params = begin(reply, read), read.params
        if params.learning_group is not None:
            params = replace(params, learning_group=arrival.preparation.owner)
        is_seeded = self.config.verification in SEEDED_RULES
        ids, seed = event_ids(writer, params, arrival.last_event_id, is_seeded=is_seeded)
        generation = Generation(
            # Not the answer's id: another Ingress may have begun the answer.
            request_id=secrets.token_hex(16) if arrival.last_event_id else writer.reply.id,
            prompts=read.prompts,
            params=params,
            timeout_s=self.config.limits.request_timeout_s,
            cache_salt=salt,
            interval_s=self.config.stream_interval_s if request.stream else WHOLE_INTERVAL_S,
            gathers_first=not request.stream,
            drawn_seed=seed,
            traceparent=traceparent(),
            predicted_token_ids=read.predicted_token_ids,
            priority=request.priority or 0,
            owner=arrival.preparation.owner,
        )
        outputs = self._routers.generate(generation)
        self.admission.submitted(arrival.preparation)
        seed = seed if read.params.seed is None else read.params.seed
        recording = Recording(request, writer, seed, self.config.verification)
        keep = partial(self._records.keep, recording) if self._records else None
        return await Answer(writer, outputs, ids, keep, hides_token=read.request.max_tokens == 0).begin()
