"""From a request's fields to SamplingParams, within the operator's limits and the model's context.

Limits that depend on the model, on settings or on several fields are here. Limits of a single field are in its type
(`deployments/openai`), limits of a body in `guard/body.py`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.sampling_fields import GenerationRequest
from deployments.wire import ModelLimits
from engine.errors import PromptTooLongError, RequestError
from engine.params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # as at OpenAI
MAX_PROMPT_LOGPROBS = 2**19  # in an answer, alternatives included: they take some 100 MB
SAME_IN_BOTH = ({setting.name for setting in fields(SamplingParams)} & GenerationRequest.model_fields.keys()) - {
    "top_k",
    "logit_bias",
    "stop",
    "max_tokens",
    "prompt_logprobs",
}
"""Parameters with the same name, meaning and default as a request field."""

T = TypeVar("T")
Request = CompletionRequest | ChatCompletionRequest


def sampling_params(request: Request, model: ModelLimits, *, max_n: int) -> SamplingParams:
    """Return a request's sampling parameters, before its prompts are tokenized; raise RequestError beyond a limit."""
    _check_fields(request, model, max_n)
    max_tokens, name = _max_tokens_of(request)
    if max_tokens is not None and max_tokens >= model.max_model_len:
        raise PromptTooLongError(
            f"{name} is {max_tokens:,}, the model takes {model.max_model_len:,} tokens with the prompt", name
        )
    logprobs = request.logprobs if isinstance(request, CompletionRequest) else None
    if isinstance(request, ChatCompletionRequest) and request.logprobs:
        logprobs = _or(request.top_logprobs, 0)
    echoed = logprobs if isinstance(request, CompletionRequest) and request.echo else None
    scored = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    is_private = request.cache_salt is not None or (request.speculative and request.speculative.learn is False)
    same = {name: getattr(request, name) for name in SAME_IN_BOTH}
    return SamplingParams(
        **{name: value for name, value in same.items() if value is not None},
        top_k=max(0, request.top_k or 0),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        stop=[request.stop] if isinstance(request.stop, str) and request.stop else list(request.stop or ()),
        max_tokens=max(1, _or(max_tokens, model.max_model_len)),
        logprobs=logprobs,
        prompt_logprobs=max(scored, default=None),
        num_speculative_tokens=_draft_length(request, model),
        fixes_draft_length=bool(request.speculative and request.speculative.fixed),
        traces_rounds=bool(request.speculative and request.speculative.trace),
        learning_group=None if is_private else "",
    )


def fit(
    params: SamplingParams, request: Request, prompts: list[list[int]], model: ModelLimits
) -> tuple[list[list[int]], SamplingParams]:
    """Return prompts, truncated if requested, and parameters that fit the context; raise RequestError if none fit."""
    is_chat = isinstance(request, ChatCompletionRequest)
    field = "messages" if is_chat else "prompt"
    max_tokens, name = _max_tokens_of(request)
    if request.prediction is not None and len(prompts) > 1:
        raise RequestError(f"prediction is only allowed with one prompt; there are {len(prompts)}", "prediction")
    if request.truncate_prompt_tokens is not None:
        num_output = _or(max_tokens, 1 if is_chat else DEFAULT_COMPLETION_TOKENS)
        room = model.max_model_len - max(1, num_output)
        prompts = _truncated(prompts, request.truncate_prompt_tokens, room, request.truncation_side)
    longest = max(map(len, prompts))
    room = model.max_model_len - longest
    if room < 1:
        raise PromptTooLongError(
            f"{field} has {longest:,} tokens, the model takes {model.max_model_len:,} with the text to come", field
        )
    if max_tokens is None:
        default = room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
        max_tokens = max(default, min(_or(request.min_tokens, 0), room))
    if max_tokens > room:
        raise PromptTooLongError(
            f"{name} is {max_tokens:,}, {field} has {longest:,} tokens, together more than the model's"
            f" {model.max_model_len:,}",
            name,
        )
    if params.prompt_logprobs is not None:
        count = sum(map(len, prompts)) * params.n * (params.prompt_logprobs + 1)
        if count > (limit := MAX_PROMPT_LOGPROBS):
            raise RequestError(f"{field} would have {count:,} log probabilities, at most {limit:,} are allowed", field)
    # Scoring a prompt generates one token, which the Answer hides.
    return prompts, replace(params, max_tokens=max(1, max_tokens))


def check_token_ids(prompts: Sequence[Sequence[int]], model: ModelLimits, field: str) -> None:
    """Raise a RequestError if a token id is not in the vocabulary."""
    for prompt in prompts:
        top = max(prompt, default=0)
        if top >= model.vocab_size:
            raise RequestError(f"{field} holds token id {top}, the model's ids end at {model.vocab_size - 1}", field)


def _truncated(prompts: list[list[int]], length: int, room: int, side: str | None) -> list[list[int]]:
    """Return the last or first `length` tokens of each prompt; -1 is `room`."""
    field = "truncate_prompt_tokens"
    if length == 0:
        raise RequestError(f"{field} is 0; at least 1 token is needed, and -1 takes all there is room for", field)
    if length > room:
        raise RequestError(f"{field} is {length:,}, with the text to come there is room for {room:,}", field)
    kept = room if length == -1 else length
    if kept < 1:
        return prompts  # `fit` refuses the number of tokens that the client wants
    return [prompt[:kept] if side == "right" else prompt[-kept:] for prompt in prompts]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise RequestError(f"{field} is {value:,}, at most {limit:,} are allowed", field)


def _check_fields(request: Request, model: ModelLimits, max_n: int) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not allowed with stream", "prompt_logprobs")
    _at_most("n", _or(request.n, 1), max_n)
    if request.speculative and request.speculative.trace and (request.n or 1) > 1:
        raise RequestError(f"n is {request.n}; with speculative.trace it must be 1", "n")
    check_token_ids([request.stop_token_ids or []], model, "stop_token_ids")
    if request.prediction is not None and request.speculative is not None and request.speculative.fixed:
        reason = "prediction is not allowed with speculative.fixed: its drafts have lengths of their own"
        raise RequestError(reason, "prediction")
    for field, reason in model.refused.items():
        value = getattr(request, field, None)
        if value is not None and value is not False:
            raise RequestError(reason, field)
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs", "top_logprobs")
        return
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens is 0; at least 1 is needed without echo", "max_tokens")
    if request.max_tokens == 0 and request.min_tokens:
        raise RequestError(f"min_tokens is {request.min_tokens}, max_tokens only 0", "min_tokens")
    if request.best_of is not None and request.best_of != _or(request.n, 1):
        raise RequestError(f"best_of is {request.best_of}; it must equal n, which is {_or(request.n, 1)}", "best_of")


def _logit_bias(bias: dict[str, float], model: ModelLimits) -> dict[int, float]:
    def is_token_id(key: str) -> bool:
        return key.isascii() and key.isdigit() and len(key) < 11 and int(key) < model.vocab_size

    wrong = [repr(key[:20]) for key in bias if not is_token_id(key)]
    if wrong:
        ids = f"the model's token ids, 0 to {model.vocab_size - 1}"
        raise RequestError(f"logit_bias has keys that are none of {ids}: {', '.join(wrong)}", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _draft_length(request: GenerationRequest, model: ModelLimits) -> int | None:
    speculation = request.speculative
    if speculation is None:
        return None
    length = speculation.num_speculative_tokens
    if speculation.enabled is False:
        for name, value in (("num_speculative_tokens", length), ("fixed", "true" if speculation.fixed else None)):
            if value:
                field = f"speculative.{name}"
                raise RequestError(f"{field} is {value}, but speculation is not enabled", field)
        return 0
    if speculation.fixed:
        if not model.num_speculative_tokens:
            raise RequestError("speculative.fixed is true, but this server makes no drafts", "speculative.fixed")
        length = _or(length, model.num_speculative_tokens)
    if length is not None:
        _at_most("speculative.num_speculative_tokens", length, model.num_speculative_tokens)
    return length


def _max_tokens_of(request: Request) -> tuple[int | None, str]:
    if request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise RequestError(
            f"max_tokens is {request.max_tokens}, max_completion_tokens {request.max_completion_tokens}; give one",
            "max_tokens",
        )
    return request.max_completion_tokens, "max_completion_tokens"
