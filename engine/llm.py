"""LLM: the engine in one process, for scripts and notebooks, with vLLM's interface."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.audit import Audit, Finding, Record
from engine.config import make_pair
from engine.drafting.assembly import assemble
from engine.drafting.settle import check_in_process, check_kinds, settle
from engine.engine import Engine
from engine.errors import RequestError
from engine.execution.memory import plan_cache
from engine.execution.registry import survey
from engine.models.registry import open_model
from engine.params import SamplingParams, are_numbers, nth_seed
from engine.protocols import TokenLogprobs, run_in_process
from engine.requests.output import FinishReason, RequestOutput
from engine.stats.drafts import SpeculationStats

Prompt = str | Sequence[int] | dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For each prompt token from the second on."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def append(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        self.stats.observe_draft(output.num_draft_tokens, output.num_accepted_tokens)


@dataclass(slots=True)
class PromptOutput:
    """A prompt and its `n` completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """A target model and its draft model in this process.

    Args:
        target_model: a transformers directory, a hub name in the local cache, `bundled`, or `auto`: the target that a
            trained head names, else the bundled target.
        draft_model: likewise, or a trained head; `none` is plain decoding, `auto` the bundled draft for the bundled
            target, else none.
        seed: requests without a seed derive theirs from it, so that runs are reproducible.
        settings: any other field of `engine.config.PairConfig`.

    Raises:
        ConfigError: a setting is unknown, or its value out of bounds.
        ModelError: a model cannot be served.
        ModelMismatchError: draft and target share less than half of the draft's tokens.
    """

    def __init__(
        self, target_model: str | Path = "auto", draft_model: str | Path = "auto", *, seed: int = 0, **settings: Any
    ) -> None:
        pair = make_pair(target_model=target_model, draft_model=draft_model, **settings)
        settled = settle(pair)
        check_in_process(settled)
        target_source = open_model(settled.target)
        draft_source = None if settled.draft is None else open_model(settled.draft)
        check_kinds(target_source, draft_source, settled.method)
        assembly = assemble(target_source, draft_source, settled.engine)
        self._seed = SamplingParams(seed=seed).seed or 0
        self._num_requests = 0
        self.tokenizer = target_source.tokenizer
        # Before any model loads.
        first = survey(target_source, settled.engine)
        config = replace(settled.engine, max_model_len=first.footprint.max_model_len)  # the draft's may be longer
        footprints = [first.footprint] + ([] if draft_source is None else [survey(draft_source, config).footprint])
        cache = plan_cache(first.free_bytes, footprints, config, device=first.device, is_script=True)
        config = replace(config, **cache._asdict())
        assembly, method = replace(assembly, engine=config), settled.method
        verifier = assembly.load_verifier()
        drafts = assembly.load_drafts()
        self._grammars = assembly.grammars
        self.engine = Engine(
            config,
            verifier.backend.info,
            drafter=method.drafter_of_engine(config, method.drafter_of(config, drafts)),
            verifier=verifier,
            num_blocks=verifier.num_blocks,
            tokenizer=self.tokenizer,
        )
        self.target = verifier.backend.info
        self.stats = self.engine.stats
        verifier.backend.warm_up()
        for draft in drafts:
            draft.backend.warm_up()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[PromptOutput]:
        """Complete every prompt.

        Args:
            prompts: a text or token ids, plain or as `{"prompt": text}` or `{"prompt_token_ids": ids}`; or a list of
                such prompts.
            params: for all prompts, or a list with an entry for each.

        Raises:
            RequestError: a prompt or a parameter is invalid for this model.
        """
        prompts = _plain(prompts)
        is_single = isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable)
        given: list[Any] = [prompts] if is_single else [*prompts]
        texts = [given] if given and are_numbers(given) else given
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(texts)
        if not isinstance(params, list | tuple) or not all(isinstance(entry, SamplingParams) for entry in params):
            raise RequestError(f"params is {params!r:.80}, allowed are SamplingParams, one or a list", "params")
        if len(params) != len(texts):
            raise RequestError(f"{len(texts)} prompts came with {len(params)} sampling parameters", "params")
        pending: dict[str, CompletionOutput] = {}
        try:
            results = [self._add(text, sampling, pending) for text, sampling in zip(texts, params, strict=True)]
            total = len(pending)
            with tqdm(desc="generating", total=total, leave=False, disable=not show_progress or total < 8) as progress:
                while pending:
                    self._step(pending)
                    progress.update(total - len(pending) - progress.n)
        finally:
            for request_id in pending:
                self.engine.abort(request_id)
        return results

    def audit(self, records: Iterable[Record]) -> Iterator[tuple[int, Finding]]:
        """Yield the number and the finding of each record, as they are done, which is not in their order.

        It is fastest with few requests and long drafts: `LLM(draft_model="none", num_speculative_tokens=64,
        max_num_seqs=8)`.

        Raises:
            RequestError: this model cannot write a record's text.
        """
        engine, given = self.engine, enumerate(records)
        pending: dict[str, tuple[int, Audit]] = {}
        try:
            while True:
                while len(pending) < engine.config.max_num_seqs and (entry := next(given, None)) is not None:
                    index, record = entry
                    params = replace(record.params, audits=True, prompt_logprobs=None)
                    if params.grammar is not None:
                        self._grammars.check(params.grammar)
                    engine.add(
                        name := f"audit-{index}", record.prompt_token_ids, params, predicted_token_ids=record.token_ids
                    )
                    pending[name] = index, Audit(record)
                if not pending:
                    return
                for output in run_in_process(engine.step()):
                    index, audit = pending[output.request_id]
                    if audit.append(output):
                        engine.abort(output.request_id)
                        del pending[output.request_id]
                        yield index, audit.finding()
        finally:
            for name in pending:
                engine.abort(name)

    def _add(self, prompt: Any, params: SamplingParams, pending: dict[str, CompletionOutput]) -> PromptOutput:
        match prompt:
            case {"prompt": str() as text, **others} if not others:
                prompt = text
            case {"prompt_token_ids": token_ids, **others} if not others:
                prompt = token_ids
        prompt = _plain(prompt)
        if isinstance(prompt, str):
            if prompt != prompt.encode(errors="replace").decode():
                raise RequestError(f"a prompt is {prompt!r:.80}, which holds half of a character", "prompts")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | dict) and are_numbers(ids := [*prompt]):
            ids = [*map(int, ids)]
        else:
            raise RequestError(f"a prompt is {prompt!r:.80}, allowed are texts and lists of token ids", "prompts")
        if params.grammar is not None:
            self._grammars.check(params.grammar)
        result = PromptOutput(prompt if isinstance(prompt, str) else None, ids, [])
        for index in range(params.n):
            first, nth = (params.seed, index) if params.seed is not None else (self._seed, self._num_requests)
            request_id = str(self._num_requests)
            self._num_requests += 1
            while len(self.engine.scheduler.waiting) >= self.engine.config.max_queued_requests:
                self._step(pending)
            self.engine.add(request_id, ids, replace(params, seed=nth_seed(first, nth), n=1))
            pending[request_id] = CompletionOutput(index)
            result.outputs.append(pending[request_id])
        return result

    def _step(self, pending: dict[str, CompletionOutput]) -> None:
        for output in run_in_process(self.engine.step()):
            completion = pending[output.request_id]
            completion.append(output)
            if output.finish_reason is not None:
                del pending[output.request_id]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
