"""LLM: the engine in one process, for scripts and notebooks, with the interface of vLLM's `LLM`."""

import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config import BUNDLED, EngineConfig, ModelConfig, make_pair
from engine.drafting.registry import DraftModel, check_family, choose_method, settle_drafting
from engine.engine import Engine
from engine.errors import RequestError
from engine.execution.backend import Backend
from engine.execution.memory import plan_kv_blocks
from engine.execution.registry import load_backend, survey
from engine.models.sub_layers import check_self_draft
from engine.models.tokenizer import check_same_vocabulary, load_tokenizer
from engine.protocols import TokenLogprobs
from engine.sampling.grammar import Grammars
from engine.sampling.params import SamplingParams, nth_seed
from engine.sequence import FinishReason, RequestOutput
from engine.stats import SpeculationStats
from engine.verification.verifier import ModelVerifier

T = TypeVar("T")

logger = logging.getLogger(__name__)


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
        target_model: a transformers directory, a hub name in the local cache, or `bundled`.
        draft_model: likewise; `none` is plain decoding, `auto` the bundled draft for the bundled target, else none.
        seed: requests without a seed derive theirs from it, so that runs are reproducible.
        settings: any other field of `engine.config.PairConfig`; `serve run` takes the same names.

    Raises:
        ConfigError: a setting is unknown, or its value out of bounds.
        ModelError: a model cannot be served.
        ModelMismatchError: draft and target do not share their token ids.
    """

    def __init__(
        self, target_model: str | Path = BUNDLED, draft_model: str | Path = "auto", *, seed: int = 0, **settings: Any
    ) -> None:
        pair = make_pair(target_model=target_model, draft_model=draft_model, **settings)
        target_config = pair.target
        draft_config, config = settle_drafting(pair)
        method = choose_method(config, has_draft_model=draft_config is not None)
        check_family(target_config, draft_config, method)
        check_self_draft(config, target_config)
        self._seed = seed
        self._num_requests = 0
        self.tokenizer = load_tokenizer(target_config)
        if draft_config is not None:
            check_same_vocabulary(target_config, draft_config)
        config = _with_planned_blocks(config, [target_config, *([draft_config] if draft_config else [])])
        target = _load(target_config)
        self._grammars = Grammars(
            target_config, vocab_size=target.info.vocab_size, eos_token_ids=target.info.eos_token_ids
        )
        verifier = ModelVerifier(target, config, self._grammars, method.make_in_target)
        backends = [target]
        draft = None
        if draft_config is not None:
            backends.append(_load(draft_config))
            draft = DraftModel(backends[-1], target.info.vocab_size, self._grammars)
        self.engine = Engine(
            config,
            drafter=method.drafter_of_engine(config, method.make(config, draft)),
            verifier=verifier,
            num_blocks=verifier.num_blocks,
            vocab_size=target.info.vocab_size,
            max_model_len=target.info.max_model_len,
            eos_token_ids=target.info.eos_token_ids,
            decoder_start_id=target.info.decoder_start_id,
            tokenizer=self.tokenizer,
        )
        for backend in backends:
            backend.warm_up()

    @property
    def stats(self) -> SpeculationStats:
        """Counters over all requests so far."""
        return self.engine.stats

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[PromptOutput]:
        """Complete every prompt; prompts are text or token ids, parameters one for all or one each.

        Raises:
            RequestError: a prompt or a parameter is invalid for this model; nothing is returned then.
        """
        texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(texts)
        if len(params) != len(texts):
            raise RequestError(f"{len(texts)} prompts came with {len(params)} sampling parameters")
        results: list[PromptOutput] = []
        pending: dict[str, CompletionOutput] = {}
        try:
            for text, sampling in zip(texts, params, strict=True):
                results.append(self._add(text, sampling, pending))
            self._run(pending, show_progress=show_progress)
        finally:
            for request_id in pending:
                self.engine.abort(request_id)
        return results

    def _add(
        self, prompt: str | Sequence[int], params: SamplingParams, pending: dict[str, CompletionOutput]
    ) -> PromptOutput:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.grammar is not None:
            self._grammars.check(params.grammar)
        result = PromptOutput(prompt if isinstance(prompt, str) else None, ids, [])
        for index in range(params.n):
            request_id = str(self._num_requests)
            first, nth = (params.seed, index) if params.seed is not None else (self._seed, self._num_requests)
            seed = nth_seed(first, nth)
            self._num_requests += 1
            output = CompletionOutput(index)
            while self.engine.num_waiting >= self.engine.config.max_queued_requests:
                self._step(pending)
            self.engine.add(request_id, ids, replace(params, seed=seed, n=1))
            result.outputs.append(output)
            pending[request_id] = output
        return result

    def _run(self, pending: dict[str, CompletionOutput], *, show_progress: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        total = len(pending)
        with Progress(*columns, transient=True, disable=not show_progress or total < 8) as progress:
            task = progress.add_task("generating", total=total)
            while pending:
                self._step(pending)
                progress.update(task, completed=total - len(pending))

    def _step(self, pending: dict[str, CompletionOutput]) -> None:
        for output in run_in_process(self.engine.step()):
            completion = pending[output.request_id]
            completion.append(output)
            if output.finish_reason is not None:
                del pending[output.request_id]


def _load(config: ModelConfig) -> Backend:
    with Console(stderr=True).status(f"loading {config.path}"):
        return load_backend(config)


def _with_planned_blocks(config: EngineConfig, models: Sequence[ModelConfig]) -> EngineConfig:
    """Return the configuration with `num_blocks` set to what fits beside these models; loads none of them."""
    if config.num_blocks is not None:
        return config
    surveys = [survey(model, config) for model in models]
    footprints = [device_survey.footprint for device_survey in surveys]
    num_blocks = plan_kv_blocks(surveys[0].free_bytes, footprints, config, device=surveys[0].device)
    return replace(config, num_blocks=num_blocks)


def run_in_process(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine that never waits and return its result.

    Unlike `asyncio.run`, this works inside a running event loop, as in a notebook.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("an in-process drafter or verifier waited for something")
