"""Sequence: the committed tokens, KV blocks and finish reason of one request; it never holds a draft token."""

from dataclasses import dataclass, field

from engine.blocks.block_pool import BlockTable, block_table
from engine.errors import RequestError
from engine.protocols import Request, TokenLogprobs, Verdict
from engine.requests.detokenizer import Detokenizer
from engine.requests.output import FinishReason, RequestOutput, RoundTrace


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine, which owns the request's `token_ids`.

    It is compared by identity, so that searching the queues is cheap.

    Attributes:
        num_computed: number of tokens whose keys and values are in `block_ids`, the block table.
        digests: digests of the full, computed blocks; see `block_digest`.
        is_in_flight: whether the request has a row in a round that has not ended.
        last_round: the number of the last round with a row of the request.
        prompt_logprobs: for the prompt tokens computed so far, from the second on, if requested.
    """

    request: Request
    end_ids: frozenset[int]
    detokenizer: Detokenizer | None
    priority: int = 0
    owner: str = ""
    block_ids: BlockTable = field(default_factory=block_table)
    digests: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    was_admitted: bool = False
    is_in_flight: bool = False
    last_round: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_uncomputed(self) -> int:
        """The number of committed tokens that still need a forward pass; 1 while decoding."""
        return len(self.request.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1

    @property
    def has_begun(self) -> bool:
        return self.was_admitted or self.request.num_output_tokens > 0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the whole prompt must be computed, cached or not, for its log probabilities."""
        return self.request.params.prompt_logprobs is not None and self.request.num_output_tokens == 0

    @property
    def num_remaining(self) -> int:
        return self.request.params.max_tokens - self.request.num_output_tokens

    def commit(self, verdict: Verdict) -> RequestOutput:
        """Append a round's tokens, up to a token that ends the request; return the output, without text."""
        request = self.request
        prompt_logprobs = self.prompt_logprobs if self.lacks_prompt_logprobs else None
        committed, texts = self._append(verdict.token_ids)
        if verdict.error:
            self.finish_reason, self.stop_reason = "error", verdict.error
        if texts and self.finish_reason is not None and not isinstance(self.stop_reason, str):
            texts[-1] += self._rest()
        num_accepted, draft, trace = min(verdict.num_accepted, len(committed)), verdict.draft, None
        if request.params.traces_rounds:
            trace = RoundTrace(texts, verdict.path[:num_accepted], draft.token_ids, draft.parents)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=committed,
            text="".join(texts),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=verdict.logprobs[: len(committed)] if verdict.logprobs is not None else None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=self.num_cached,
            num_draft_tokens=len(draft.token_ids),
            num_accepted_tokens=num_accepted,
            prompt_logprobs=prompt_logprobs,
            trace=trace,
            num_predicted_tokens=num_accepted if draft.is_predicted else 0,
            differences=verdict.differences,
        )

    def decode(self, output: RequestOutput) -> None:
        """Add the text of an output, unless `commit` added it; call this for all outputs, in order."""
        params = self.request.params
        if not self._needs_texts:
            is_shown = output.finish_reason != "stop" or params.include_stop_str_in_output
            output.text = self._decode(output.token_ids if is_shown else output.token_ids[:-1], may_stop=True)
            if output.finish_reason is not None:
                output.text += self._rest()

    def resume(self, token_ids: list[int]) -> None:
        """Append output that another engine committed; the client already has its text.

        Raises:
            RequestError: the output ends the request.
        """
        if not self._append(token_ids)[1]:
            self._decode(token_ids, may_stop=True)
        if self.finish_reason is not None:
            raise RequestError(f"the output so far of {len(token_ids)} tokens ends the text", "output_token_ids")

    def _append(self, token_ids: list[int]) -> tuple[list[int], list[str]]:
        """Append tokens, up to a token that ends the request; return them, and their texts if `_needs_texts`."""
        request, params = self.request, self.request.params
        start = len(request.token_ids)
        texts: list[str] = []
        for token in token_ids:
            request.token_ids.append(token)
            may_stop = request.num_output_tokens >= params.min_tokens
            is_end = may_stop and (token in self.end_ids or token in params.stop_token_ids)
            if is_end:
                self.finish_reason = "stop"
                # As in vLLM, stop_reason is the token for a stop id and None for end-of-text.
                self.stop_reason = token if token in params.stop_token_ids else None
            if self._needs_texts:
                shown = [token] if not is_end or params.include_stop_str_in_output else []
                texts.append(self._decode(shown, may_stop))
            if self.finish_reason is None and self.num_remaining <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return request.token_ids[start:], texts

    @property
    def _needs_texts(self) -> bool:
        """Whether tokens must be decoded as they are committed: a stop string can end the text within a round."""
        return bool(self.request.params.stop) or self.request.params.traces_rounds

    def _rest(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.finish()

    def _decode(self, token_ids: list[int], may_stop: bool) -> str:
        if self.detokenizer is None or not token_ids:
            return ""
        text, stop = self.detokenizer.append(token_ids, may_stop=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            if self.request.params.include_stop_str_in_output:
                text += stop
        return text
