"""RecordReader: what the audit of a record asks of the engine, and the body that says what it found."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deployments.openai.logprobs import LEAST_LOGPROB
from deployments.openai.types import ResponseModel
from deployments.prompts.encoder import PromptEncoder
from deployments.prompts.parameters import check_token_ids
from deployments.prompts.reader import RequestReader
from deployments.records.record import GeneratingRequest, Record, RecordedChoice
from deployments.routing.resumable_stream import ResumableStream
from deployments.wire import Generation, choice_index
from engine.audit import Audit, Finding
from engine.audit import Record as RecordedText
from engine.config import SEEDED_RULES
from engine.errors import RequestError
from engine.params import SamplingParams
from engine.protocols import Difference
from engine.requests.detokenizer import TokenBytes


class TokenDifference(ResponseModel):
    """Where the target writes another token, and by how much that scores more: log probability plus noise.

    9999 stands for infinity: the recorded token can never be drawn.
    """

    position: int
    token_id: int
    token: str
    target_token_id: int
    target_token: str
    margin: float


class AuditedChoice(ResponseModel):
    """What differs from the target's text; `is_tokenized` without recorded ids, for which others may stand, too."""

    index: int
    num_tokens: int
    differences: list[TokenDifference]
    problems: list[str]
    logprobs_apart: float
    is_tokenized: bool

    def is_equal(self, near: float) -> bool:
        """Return whether nothing differs but tokens whose scores are at most `near` apart."""
        differences = [Difference(each.position, each.target_token_id, each.margin) for each in self.differences]
        return Finding(self.num_tokens, differences, self.problems, self.logprobs_apart).is_equal(near)


class AuditBody(ResponseModel):
    """The body of an audit."""

    object: Literal["audit"]
    system_fingerprint: str
    recorded_fingerprint: str | None
    choices: list[AuditedChoice]


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A record, its prompts, parameters, and the token ids of each choice."""

    record: Record
    prompts: list[list[int]]
    params: SamplingParams
    token_ids: list[list[int]]

    def generation(self, request_id: str, timeout_s: float, **fields: Any) -> Generation:
        """Return the request that audits the answer."""
        seed, recorded = self.record.seed or 0, dict(enumerate(self.token_ids))  # no seed is of effect when greedy
        return Generation(
            request_id, self.prompts, self.params, timeout_s, drawn_seed=seed, recorded=recorded, **fields
        )

    def texts(self) -> list[RecordedText]:
        """Return each choice as the engine takes it."""
        return [
            RecordedText(
                sequence.prompt_token_ids,
                sequence.params,
                sequence.predicted_token_ids,
                choice.finish_reason,
                choice.text,
                choice.logprobs,
            )
            for sequence, choice in zip(self.generation("", 0.0).sequences(), self.record.choices, strict=True)
        ]

    async def findings(self, outputs: ResumableStream) -> list[Finding]:
        """Audit all choices in the outputs of the request, and end it."""
        audits = list(map(Audit, self.texts()))
        unfinished = set(range(len(audits)))
        try:
            while unfinished and (rounds := await outputs.next()):
                for output in rounds:
                    index = choice_index(output.request_id)
                    if index in unfinished and audits[index].append(output):
                        unfinished.remove(index)
        finally:
            await outputs.close()
        return [audit.finding() for audit in audits]

    def body(self, findings: Sequence[Finding], fingerprint: str, token_bytes: TokenBytes) -> AuditBody:
        def shown(difference: Difference, token_id: int) -> TokenDifference:
            position, target_token_id, margin = difference
            token, target_token = token_bytes.texts([token_id, target_token_id])
            pair = {"token": token, "target_token_id": target_token_id, "target_token": target_token}
            return TokenDifference(position=position, token_id=token_id, margin=min(margin, -LEAST_LOGPROB), **pair)

        choices = [
            AuditedChoice(
                index=index,
                num_tokens=finding.num_tokens,
                differences=[shown(each, self.token_ids[index][each.position]) for each in finding.differences],
                problems=finding.problems,
                logprobs_apart=finding.logprobs_apart,
                is_tokenized=self.record.choices[index].token_ids is None,
            )
            for index, finding in enumerate(findings)
        ]
        recorded = self.record.system_fingerprint
        return AuditBody(object="audit", system_fingerprint=fingerprint, recorded_fingerprint=recorded, choices=choices)


class RecordReader:
    """Reads records for one target."""

    def __init__(self, reader: RequestReader, encoder: PromptEncoder, eos_token_ids: Sequence[int]) -> None:
        self._reader, self._encoder, self._eos_token_ids = reader, encoder, eos_token_ids

    async def read(self, record: Record, request: GeneratingRequest, salt: str | None) -> RecordedAnswer:
        """Return what a record asks of the engine; `request` is the record's own.

        Raises:
            RequestError: the record cannot be checked, or the server would refuse its request.
            CapacityError: the grammar was not compiled in time.
        """
        read = await self._reader.read(request, salt)
        if read.params.temperature > 0:
            _check_seed(record, read.params.seed)
        if (num_texts := len(record.choices)) != (wanted := len(read.prompts) * read.params.n):
            raise RequestError(f"choices has {num_texts} texts, the request asks for {wanted}", "choices")
        token_ids = []
        for index, choice in enumerate(record.choices):
            ids = choice.token_ids or await self._tokens(choice, read.params)
            if not ids:
                raise RequestError(f"choices.{index} has neither token_ids nor text", f"choices.{index}")
            check_token_ids([ids], self._reader.model, f"choices.{index}.token_ids")
            token_ids.append(ids)
        return RecordedAnswer(record, read.prompts, replace(read.params, audits=True), token_ids)

    async def _tokens(self, choice: RecordedChoice, params: SamplingParams) -> list[int]:
        """Return the tokens that the text may have been written in, with its end."""
        stop, text = choice.stop_reason, choice.text or ""
        if isinstance(stop, str) and not params.include_stop_str_in_output:
            text += stop
        ids = await self._encoder.encode_answer(text, self._reader.model.max_model_len) if text else []
        has_end = choice.text is not None and choice.finish_reason == "stop" and stop is None
        return [*ids, self._eos_token_ids[0]] if has_end else ids


def _check_seed(record: Record, seed: int | None) -> None:
    if record.verification not in (None, *SEEDED_RULES):
        raise RequestError(f"verification is {record.verification}: its texts depend on drafts", "verification")
    if seed is None and record.seed is None:
        raise RequestError("seed is missing, in the record and in its body", "seed")
    if seed is not None and record.seed not in (None, seed):
        raise RequestError(f"seed is {record.seed}, but {seed} in the body", "seed")
