"""RequestLimits: which requests a model and its KV cache can serve."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.config import SEEDED_RULES, EngineConfig, ModelInfo
from engine.errors import PromptTooLongError, RequestError
from engine.models.registry import refused_fields
from engine.params import SamplingParams


class RequestLimits:
    """The limits of an engine; `max_model_len` is the most tokens of prompt and text, without a start token."""

    def __init__(self, config: EngineConfig, target: ModelInfo, num_blocks: int) -> None:
        self._config = config
        num_start_ids = int(target.start_id is not None)
        longest = target.max_model_len
        self.max_model_len = min(config.max_model_len or longest, longest - num_start_ids)
        self._usable = (num_blocks - 1) * config.block_size - num_start_ids
        self._refused = refused_fields(target)
        self._vocab_size = target.vocab_size
        self._adapters = target.adapters
        self._prompt_limits = [
            (self.max_model_len - 1, f"the context of {self.max_model_len} must also hold one output token"),
            (self._usable - 1, f"the KV cache holds {self._usable}"),
        ]
        if num_start_ids:
            pass_tokens = config.max_num_batched_tokens
            reason = f"one pass must compute it, and max_num_batched_tokens is {pass_tokens}"
            self._prompt_limits.append((pass_tokens, reason))

    def fit(self, prompt_token_ids: Sequence[int], params: SamplingParams, *, is_new: bool) -> SamplingParams:
        """Return the parameters with a seed, and with `max_tokens` and the draft length within the limits.

        Raises:
            RequestError: the model cannot serve the prompt or a parameter.
        """
        length = len(prompt_token_ids)
        if length == 0:
            raise RequestError("the prompt is empty", "prompt")
        for limit, reason in self._prompt_limits:
            if length > limit:
                raise PromptTooLongError(f"the prompt has {length} tokens; {reason}", "prompt")
        for field, reason in self._refused.items():
            if getattr(params, field, None) is not None:
                raise RequestError(reason, field)
        if params.adapter is not None and params.adapter not in self._adapters:
            raise RequestError(f"adapter is {params.adapter!r}, the target has {[*self._adapters]}", "adapter")
        room = min(self.max_model_len, self._usable) - length
        if params.min_tokens > room:
            raise RequestError(f"min_tokens is {params.min_tokens}; the context has room for {room}", "min_tokens")
        self.check_ids("prompt", prompt_token_ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        longest, num_draft_tokens = self._config.max_draft_tokens, params.num_speculative_tokens
        if num_draft_tokens is not None and num_draft_tokens > longest:
            if is_new and params.fixes_draft_length:
                raise RequestError(
                    f"num_speculative_tokens is fixed at {num_draft_tokens}; drafts have {longest} tokens at most",
                    "num_speculative_tokens",
                )
            num_draft_tokens = longest
        return replace(
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=min(params.max_tokens, room),
            num_speculative_tokens=num_draft_tokens,
            # The client has them if the request has output; asking again would rule out cached blocks.
            prompt_logprobs=params.prompt_logprobs if is_new else None,
        )

    def check_audit(self) -> None:
        """Raise RequestError unless texts are made by seed alone, and a pass can verify more than one token."""
        if (rule := self._config.verification) not in SEEDED_RULES:
            needed = " or ".join(SEEDED_RULES)
            raise RequestError(
                f"verification is {rule}; an audit needs {needed}, as other texts depend on drafts", "audits"
            )
        for name, least in (("num_speculative_tokens", 1), ("max_num_batched_tokens", 2)):
            if (value := getattr(self._config, name)) < least:
                raise RequestError(f"{name} is {value}; an audit needs {least} at least", "audits")

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        if bad := [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < self._vocab_size]:
            raise RequestError(f"{name} contains token id {bad[0]}; ids are 0 to {self._vocab_size - 1}", name)
