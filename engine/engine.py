"""Engine: `add`, `abort` and `step`; a step runs one round: propose, verify, commit."""

import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Any

from engine.block_pool import salt_digest
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.draft_length import Goodput
from engine.drafting.check import draft_problem
from engine.drafting.registry import acceptance_of
from engine.errors import DrafterError, PromptTooLongError, RequestError
from engine.protocols import NO_DRAFT, Draft, Drafter, PlansCopies, ProposeRow, Request, Verifier, VerifyRow
from engine.request_stats import RequestStats
from engine.sampling.params import SamplingParams
from engine.scheduler import ScheduledRow, Scheduler
from engine.sequence import RequestOutput, Sequence, Times
from engine.stats import SpeculationStats


class Engine:
    """Runs requests with a drafter and a verifier, wherever these two compute.

    Args:
        num_blocks: the target's KV blocks, including block 0, which no request gets.
        tokenizer: a transformers fast tokenizer; None leaves `RequestOutput.text` empty.
        decoder_start_id: the token that starts the text of an encoder-decoder. Prompts then go to its encoder, whole
            and in one pass, and nothing cached is shared: what the encoder makes of a token depends on all others.
        clock: returns seconds; round times are measured with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafter: Drafter,
        verifier: Verifier,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Ids[int] = (),
        decoder_start_id: int | None = None,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._start = [] if decoder_start_id is None else [decoder_start_id]
        if self._start:
            config = replace(config, enable_prefix_caching=False)
        self.config = config
        self.drafter = drafter
        self.verifier = verifier
        self.vocab_size = vocab_size
        # Of prompts and texts, to which a decoder's first token is added.
        self.max_model_len = min(config.max_model_len or max_model_len, max_model_len - len(self._start))
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = None if tokenizer is None else getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.scheduler = Scheduler(config, num_blocks, self.max_model_len + len(self._start))
        self._copier = drafter if isinstance(drafter, PlansCopies) else None
        self.goodput = Goodput(config.num_speculative_tokens, config.speculation, acceptance_of(config))
        self.request_stats = RequestStats(self.max_model_len)
        self._clock = clock
        self._round_ended: float | None = None

    @property
    def stats(self) -> SpeculationStats:
        """Counters since this engine was made."""
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether the next round is likely to compute prompts; see `Scheduler.has_prompts`."""
        return self.scheduler.has_prompts

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.scheduler.waiting)

    @property
    def unstarted_ids(self) -> list[str]:
        """Requests in the queue of which nothing has been computed yet, oldest first."""
        return self.scheduler.unstarted_ids

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds, cached prefixes included."""
        return self.scheduler.pool.num_free

    @property
    def num_blocks(self) -> int:
        """KV blocks that requests can hold."""
        return self.scheduler.pool.num_blocks - 1

    def add(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        output_token_ids: Ids[int] = (),
    ) -> None:
        """Queue a request; it shares cached prefixes only with requests of the same `cache_salt`.

        Args:
            output_token_ids: tokens that another engine has committed for this request; the text goes on after them,
                with the same seed in `params` and the coupled rule as it would have there, else by the same law. Such
                a request comes before those without.

        Raises:
            RequestError: this model cannot serve the prompt or a parameter, its drafts are shorter than the fixed
                length, or the output has ended.
            QueueFullError: `max_queued_requests` are waiting, and the request has no output yet.
        """
        params = self._resolve(prompt_token_ids, params)
        if output_token_ids:
            # They came with the first of these tokens, and would hinder the use of cached blocks.
            params = replace(params, prompt_logprobs=None)
        else:
            self._check_draft_length(params)
        tokens = [*prompt_token_ids, *self._start]
        encoder_length = len(prompt_token_ids) if self._start else 0
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(
                self._tokenizer, tokens[encoder_length:], stop=params.stop, skip_special=params.skip_special_tokens
            )
        elif params.stop:
            raise RequestError("stop strings need a tokenizer; this engine has none", "stop")
        sequence = Sequence(
            Request(request_id, tokens, len(tokens), params, salt_digest(cache_salt), encoder_length),
            end_ids=frozenset() if params.ignore_eos else self._eos,
            detokenizer=detokenizer,
            times=Times(added_s=self._clock()),
        )
        sequence.resume(list(output_token_ids))
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; unknown ids are ignored."""
        self.scheduler.abort(request_id)
        self._release(request_id)

    def reset(self) -> None:
        """Recompute every running request from its committed tokens, after the target lost its KV cache."""
        self.scheduler.reset()
        self._round_ended = None

    async def step(self) -> list[RequestOutput]:
        """Run one round.

        Raises:
            TargetError: the round failed and committed nothing; call `reset` and step again.
            DrafterError: the drafter proposed an invalid draft; nothing was computed.
        """
        # Time between rounds counts towards the later round, unless the engine was idle.
        started = self._clock() if self._round_ended is None else self._round_ended
        limits, fixed = self.scheduler.draft_limits, self.scheduler.fixed_draft_lengths
        copies = self._plan_copies()
        # A fixed length or a copy says nothing about what another length would cost, or how often it is accepted.
        is_measured = not fixed and not copies and not self.has_prompts
        num_draft_tokens = self.goodput.choose(limits, is_measured=is_measured)
        rows = self.scheduler.next_batch(num_draft_tokens, copies)
        if not rows:
            return []
        drafts = await self._propose(rows, num_draft_tokens)
        verdicts = await self.verifier.verify(
            [_verify_row(row.sequence, row.length, draft) for row, draft in zip(rows, drafts, strict=True)]
        )
        drafts = [
            draft if verdict.draft is None else verdict.draft for draft, verdict in zip(drafts, verdicts, strict=True)
        ]
        outputs = self.scheduler.commit(rows, drafts, verdicts)
        chosen = (num_draft_tokens, self.goodput.reason) if limits or not fixed else (max(fixed), "request")
        self.scheduler.stats.observe_round(*chosen)
        for row, verdict in zip(rows, verdicts, strict=True):
            request = row.sequence.request
            if not request.params.fixes_draft_length and request.request_id not in copies:
                self.goodput.observe_draft(row.num_draft_tokens, verdict.path)
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request_id)
        ended = self._clock()
        self.request_stats.observe(rows, outputs, started_s=started, ended_s=ended)
        if is_measured and len(rows) == len(limits):
            self.goodput.observe(limits, ended - started)
        self._round_ended = ended if self.has_work else None
        return outputs

    async def _propose(self, rows: list[ScheduledRow], num_draft_tokens: int) -> list[Draft]:
        """Return one draft per row; without draft tokens in this round, the drafter is not called."""

        def will_speculate(row: ScheduledRow) -> bool:
            # A row in prefill gets no draft yet, but its prompt lets a drafter that runs ahead prepare one.
            params = row.sequence.request.params
            may_have_chain = (num_draft_tokens > 0 or params.fixes_draft_length) and params.num_speculative_tokens != 0
            return may_have_chain or row.num_draft_tokens > 0

        speculating = [row for row in rows if will_speculate(row)]
        if not speculating:
            return [NO_DRAFT] * len(rows)
        proposed = await self.drafter.propose(
            [ProposeRow(row.sequence.request, row.num_draft_tokens) for row in speculating]
        )
        for row, draft in zip(speculating, proposed, strict=True):
            if (problem := draft_problem(draft, row.num_draft_tokens, self.vocab_size)) is not None:
                raise DrafterError(f"draft of {row.sequence.request.request_id}: {problem}")
        drafts = {id(row): draft for row, draft in zip(speculating, proposed, strict=True)}
        return [drafts.get(id(row), NO_DRAFT) for row in rows]

    def _plan_copies(self) -> Mapping[str, int]:
        """Return the lengths of the drafts that will be copies, by request id; drafters that do not copy plan none."""
        if self._copier is None:
            return {}
        decoding = [sequence.request for sequence in self.scheduler.running if sequence.is_decoding]
        requests = [request for request in decoding if not request.params.fixes_draft_length]
        rows = [
            ProposeRow(request, limit) for request, limit in zip(requests, self.scheduler.draft_limits, strict=True)
        ]
        return self._copier.plan_copies(rows, self.goodput.num_draft_tokens)

    def _resolve(self, prompt_token_ids: Ids[int], params: SamplingParams) -> SamplingParams:
        """Check a request against the model, choose a missing seed, and cap `max_tokens` at the context."""
        length = len(prompt_token_ids)
        if length == 0:
            raise RequestError("the prompt is empty", "prompt")
        if length >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {length} tokens; the context of {self.max_model_len} must also hold one output token",
                "prompt",
            )
        if self._start:
            self._check_encoder_input(length, params)
        usable = self.num_blocks * self.config.block_size - len(self._start)
        room = min(self.max_model_len, usable) - length
        if room <= 0:
            raise PromptTooLongError(f"the prompt has {length} tokens; the KV cache holds {usable}", "prompt")
        if params.min_tokens > room:
            raise RequestError(f"min_tokens is {params.min_tokens}; the context has room for {room}", "min_tokens")
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", list(params.logit_bias)),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                bad = next(i for i in ids if not 0 <= i < self.vocab_size)
                raise RequestError(f"{name} contains token id {bad}; ids are 0 to {self.vocab_size - 1}", name)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return replace(params, seed=seed, max_tokens=min(params.max_tokens, room))

    def _check_encoder_input(self, length: int, params: SamplingParams) -> None:
        """Refuse a prompt that one pass cannot compute, and what only a prompt of a decoder has."""
        longest = self.config.max_num_batched_tokens
        if length > longest:
            raise PromptTooLongError(
                f"the prompt has {length} tokens; an encoder takes it whole, and max_num_batched_tokens is {longest}",
                "prompt",
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "this model encodes its prompt and predicts none of it, so there are no prompt_logprobs",
                "prompt_logprobs",
            )

    def _check_draft_length(self, params: SamplingParams) -> None:
        """Refuse a fixed draft length above that of this engine; one that is not fixed may be any upper bound."""
        longest = 0 if self.config.speculation == "off" else self.config.num_speculative_tokens
        length = params.num_speculative_tokens
        if params.fixes_draft_length and length is not None and length > longest:
            raise RequestError(
                f"num_speculative_tokens is fixed at {length}; drafts have {longest} tokens at most",
                "num_speculative_tokens",
            )

    def _release(self, request_id: str) -> None:
        self.drafter.release(request_id)
        self.verifier.release(request_id)


def _verify_row(sequence: Sequence, length: int, draft: Draft) -> VerifyRow:
    return VerifyRow(sequence.request, sequence.num_computed, length, sequence.block_ids, draft)
