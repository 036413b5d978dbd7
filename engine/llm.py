"""LLM: the engine in one process, for scripts and notebooks, with the interface of vLLM's `LLM`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.config import make_pair
from engine.control.stats import SpeculationStats
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.translated import translated
from engine.drafting.registry import check_kinds, choose_method, settle_drafting
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.execution.memory import plan_cache
from engine.execution.registry import make_backend, survey
from engine.heads.registry import load_target
from engine.models.first_layers import check_self_draft
from engine.models.loader import load_model
from engine.models.registry import open_model
from engine.models.source import shared_tokens
from engine.params import SamplingParams, are_numbers, nth_seed
from engine.protocols import FinishReason, RequestOutput, TokenLogprobs, run_in_process
from engine.sampling.grammar import Grammars
from engine.verification.rule import rule_of
from engine.verification.verifier import ModelVerifier

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
    """One entry per prompt token from the second on."""
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def append(self, output: RequestOutput) -> None:
        """Append the output of one round."""
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
            trained head names, else the bundled one.
        draft_model: likewise, or a trained head; `none` is plain decoding, `auto` the bundled draft for the bundled
            target, else none.
        seed: requests without a seed derive theirs from it, so that runs are reproducible.
        settings: any other field of `engine.config.PairConfig`; `serve run` takes the same names.

    Raises:
        ConfigError: a setting is unknown, or its value out of bounds.
        ModelError: a model cannot be served.
        ModelMismatchError: draft and target have less than half of the draft's tokens in common.
    """

    def __init__(
        self, target_model: str | Path = "auto", draft_model: str | Path = "auto", *, seed: int = 0, **settings: Any
    ) -> None:
        pair = make_pair(target_model=target_model, draft_model=draft_model, **settings)
        target_config, draft_config, config = settle_drafting(pair)
        if draft_config is not None and target_config.head is not None:
            raise ConfigError(
                f"drafting is {config.drafting!r}, but there is no draft worker in this process; use head"
            )
        target_source = open_model(target_config)
        draft_source = None if draft_config is None else open_model(draft_config)
        method = choose_method(config, has_draft_model=draft_config is not None)
        check_kinds(target_source, draft_source, method)
        check_self_draft(config, target_source)
        target_source.check_length(config.max_model_len)
        self._seed = SamplingParams(seed=seed).seed or 0
        self._num_requests = 0
        self.tokenizer = target_source.tokenizer
        if draft_source is not None:
            shared_tokens(target_source, draft_source)
        # Before any model loads.
        first = survey(target_source, config)
        config = replace(config, max_model_len=first.footprint.max_model_len)  # the draft's may be longer
        footprints = [first.footprint] + ([] if draft_source is None else [survey(draft_source, config).footprint])
        cache = plan_cache(first.free_bytes, footprints, config, device=first.device, is_script=True)
        config = replace(config, **cache._asdict())
        branches = method.branches(config)
        target = make_backend(load_target(target_source), target_source, config, branches=branches)
        info = target.info
        self._grammars = Grammars(target_source, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        verifier = ModelVerifier(target, config, self._grammars, method.make_in_target)
        backends, draft = [target], None
        if draft_source is not None:
            invariant = rule_of(config.verification).needs_invariant_draft
            model = load_model(draft_source)
            backend = make_backend(model, draft_source, config, invariant=invariant, branches=branches)
            backends.append(translated(backend, target_source, draft_source))
            draft = DraftModel(backends[-1], info.vocab_size, self._grammars)
        self.engine = Engine(
            config,
            info,
            drafter=method.drafter_of_engine(config, method.make(config, draft)),
            verifier=verifier,
            num_blocks=verifier.num_blocks,
            tokenizer=self.tokenizer,
        )
        self.stats = self.engine.stats
        for backend in backends:
            backend.warm_up()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[PromptOutput]:
        """Complete every prompt; parameters are one for all, or one each.

        A prompt is text or token ids, also as `{"prompt": text}` or `{"prompt_token_ids": ids}`; `[1, 2]` is one.

        Raises:
            RequestError: a prompt or a parameter is invalid for this model; nothing is returned then.
        """
        prompts = _plain(prompts)
        is_one = isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable)
        given: list[Any] = [prompts] if is_one else [*prompts]
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
    """Return an array or tensor as lists, and any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
