"""Who checks records: a server's /v1/audit, or a target in this process."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from deployments.config import AppConfig
from deployments.diagnosis.http_client import PAUSES_S, Client, ServerError
from deployments.ingress.server_info import fingerprint
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.grammar_compiler import GrammarCompiler
from deployments.prompts.reader import RequestReader
from deployments.records.record import Record
from deployments.records.record_reader import AuditBody, RecordedAnswer, RecordReader
from deployments.sections import ingress_config
from deployments.wire import ModelLimits
from engine.errors import RequestError
from engine.models.registry import open_model, refused_fields
from engine.sampling.grammar import Grammars

Auditor = Callable[[Sequence[Record]], list[AuditBody | str]]
"""Returns for each record what its audit found, or why it cannot be checked."""
NUM_AT_ONCE = 4
ENGINE = {"draft_model": "none", "num_speculative_tokens": "64", "max_num_seqs": "8"}
"""Settings of an engine that audits: few texts at once, and long pieces of each."""
MAX_N = 128  # as in the API
_REFUSALS = {400, 404, 413}


def server_auditor(client: Client) -> Auditor:
    """Return an auditor that asks a server, and raises ServerError if that fails or stays too busy."""

    def audit(records: Sequence[Record]) -> list[AuditBody | str]:
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            return list(threads.map(partial(ask_server, client), records))

    return audit


def ask_server(client: Client, record: Record) -> AuditBody | str:
    """Return what a server's audit found, or why it refuses the record; ask again while the server is busy."""
    body, pauses = record.model_dump(mode="json", exclude_none=True), iter(PAUSES_S)
    while True:
        try:
            return AuditBody.model_validate(client.post("/v1/audit", body))
        except ServerError as error:
            if error.status in _REFUSALS:
                return error.message
            if error.status not in (429, 503) or (pause_s := next(pauses, None)) is None:
                raise
        time.sleep(pause_s)


def local_auditor(settings: Mapping[str, str]) -> Auditor:
    """Load the target that the settings name, and return its auditor; raise ArgumentError for a wrong setting.

    The auditor raises RequestError if the target's cache cannot hold a text.
    """
    from engine.llm import LLM

    config = AppConfig.model_validate({**ENGINE, **settings})
    llm, target = LLM(**asdict(config.pair)), open_model(config.settled.target)
    info, encoder, length = llm.target, PromptEncoder(target.tokenizer), config.pair.num_speculative_tokens
    here = fingerprint(ingress_config(config), info, target.tokenizer)
    limits = ModelLimits(info.vocab_size, llm.engine.max_model_len, length, refused_fields(info))
    grammars = Grammars(target, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
    requests = RequestReader(encoder, GrammarCompiler(grammars), limits, adapters={}, max_n=MAX_N)
    reader = RecordReader(requests, encoder, info.eos_token_ids)

    async def read(record: Record) -> RecordedAnswer | str:
        try:
            return await reader.read(record, record.request(), None)
        except RequestError as error:
            return str(error)

    async def read_all(records: Sequence[Record]) -> list[RecordedAnswer | str]:
        return [await read(record) for record in records]

    def audit(records: Sequence[Record]) -> list[AuditBody | str]:
        answers = asyncio.run(read_all(records))
        texts = [text for answer in answers if not isinstance(answer, str) for text in answer.texts()]
        found = iter(finding for _, finding in sorted(llm.audit(texts), key=lambda pair: pair[0]))
        return [
            answer
            if isinstance(answer, str)
            else answer.body([next(found) for _ in answer.token_ids], here, encoder.token_bytes)
            for answer in answers
        ]

    return audit
