"""sampling_params: from a request's fields to SamplingParams, within the operator's limits and the model's context."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from deployments.config import Limits
from deployments.openai.chat import ChatCompletionRequest
from deployments.openai.completions import CompletionRequest
from deployments.openai.sampling_fields import GenerationRequest
from deployments.router.generation import ModelLimits
from engine.errors import PromptTooLongError, RequestError
from engine.sampling.params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's."""

T = TypeVar("T")


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest, model: ModelLimits, limits: Limits
) -> SamplingParams:
    """Return how to draw the tokens of a request, as far as that does not depend on the prompts.

    Raises:
        RequestError: a field beyond a limit; nothing has been tokenized.
    """
    stop = _stop_strings(request, limits)
    _check_limits(request, model, limits)
    logprobs = _logprobs(request, limits)
    max_tokens, name = _max_tokens_of(request)
    if max_tokens is None:
        max_tokens = model.max_model_len
    elif max_tokens >= model.max_model_len:
        raise PromptTooLongError(
            f"{name} is {max_tokens:,}, the model takes {model.max_model_len:,} tokens with the prompt", name
        )
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, _or(request.top_k, 0)),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        seed=request.seed,
        stop=stop,
        stop_token_ids=list(request.stop_token_ids or []),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        min_tokens=_or(request.min_tokens, 0),
        max_tokens=max(1, max_tokens),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=_or(request.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, limits),
        num_speculative_tokens=_draft_length(request, model),
        fixes_draft_length=bool(request.speculative and request.speculative.fixed),
        n=_or(request.n, 1),
    )


def within_room(
    params: SamplingParams,
    request: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[Sequence[int]],
    model: ModelLimits,
    limits: Limits,
) -> SamplingParams:
    """Return the parameters with as many tokens as fit after the prompts.

    Raises:
        PromptTooLongError: fewer fit than the request asks for.
        RequestError: the prompts' log probabilities would be too many to keep and to send.
    """
    if params.prompt_logprobs is not None:
        count, most = sum(map(len, prompts)) * params.n * (params.prompt_logprobs + 1), limits.max_prompt_logprobs
        if count > most:
            field = _prompt_field(request)
            raise RequestError(f"{field} would have {count:,} log probabilities, at most {most:,} are allowed", field)
    # Scoring a prompt takes a pass that generates one token; the Answer hides it.
    return replace(params, max_tokens=max(1, _max_tokens(request, prompts, model)))


def truncated(prompt: list[int], request: CompletionRequest | ChatCompletionRequest, model: ModelLimits) -> list[int]:
    """Return the last tokens of a prompt, or the first, as many as the client wants or there is room for.

    Raises:
        RequestError: the client wants none, or more than there is room for.
    """
    length, field = request.truncate_prompt_tokens, "truncate_prompt_tokens"
    if length is None:
        return prompt
    num_output, _ = _max_tokens_of(request)
    if num_output is None:
        num_output = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else 1
    room = model.max_model_len - max(1, num_output)
    if length == 0:
        raise RequestError(f"{field} is 0; at least 1 token is needed, and -1 takes all there is room for", field)
    if length > room:
        raise RequestError(f"{field} is {length:,}, with the text to come there is room for {room:,}", field)
    kept = room if length == -1 else length
    if kept < 1:
        return prompt  # refused for what the client wants at most
    return prompt[:kept] if request.truncation_side == "right" else prompt[-kept:]


def check_token_ids(prompts: Sequence[Sequence[int]], model: ModelLimits, field: str) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        RequestError: naming the first such id.
    """
    for prompt in prompts:
        top = max(prompt, default=0)
        if top >= model.vocab_size:
            raise RequestError(f"{field} holds token id {top}, the model's ids end at {model.vocab_size - 1}", field)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _at_most(field: str, value: float, limit: float, what: str = "") -> None:
    if value > limit:
        raise RequestError(f"{field} is {value:,}{what}, at most {limit:,} are allowed", field)


def _check_limits(request: CompletionRequest | ChatCompletionRequest, model: ModelLimits, limits: Limits) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream", "stream_options")
    _at_most("n", _or(request.n, 1), limits.max_n)
    check_token_ids([request.stop_token_ids or []], model, "stop_token_ids")
    if model.has_encoder:
        _check_encoder_decoder(request)
    if isinstance(request, ChatCompletionRequest):
        return
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens is 0; at least 1 is needed without echo", "max_tokens")
    if request.max_tokens == 0 and request.min_tokens:
        raise RequestError(f"min_tokens is {request.min_tokens}, max_tokens only 0", "min_tokens")
    if request.best_of is not None and request.best_of != _or(request.n, 1):
        raise RequestError(f"best_of is {request.best_of}; it must equal n, which is {_or(request.n, 1)}", "best_of")


def _check_encoder_decoder(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Refuse conversations, and what needs a model that predicts its prompt."""
    if isinstance(request, ChatCompletionRequest):
        raise RequestError(
            "this model is an encoder-decoder, which takes no conversations; use /v1/completions", "messages"
        )
    reason = "this model is an encoder-decoder, whose text does not continue the prompt"
    if request.echo:
        raise RequestError(f"echo is true, but {reason}", "echo")
    if request.prompt_logprobs is not None:
        raise RequestError(f"prompt_logprobs is {request.prompt_logprobs}, but {reason}", "prompt_logprobs")


def _stop_strings(request: GenerationRequest, limits: Limits) -> list[str]:
    stop = list(request.stop or []) if not isinstance(request.stop, str) else [request.stop] if request.stop else []
    for text in stop:
        _at_most("stop", len(text), limits.max_stop_chars, " characters long")
    return stop


def _logit_bias(bias: dict[str, float], model: ModelLimits) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError(f"logit_bias has the key {key[:20]!r}, not a token id", "logit_bias")
        by_id[int(key)] = value
    check_token_ids([list(by_id)], model, "logit_bias")
    return by_id


def _logprobs(request: CompletionRequest | ChatCompletionRequest, limits: Limits) -> int | None:
    if isinstance(request, CompletionRequest):
        field, logprobs = "logprobs", request.logprobs
    else:
        field, logprobs = "top_logprobs", request.top_logprobs
        if logprobs is not None and not request.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs", field)
        if request.logprobs and logprobs is None:
            logprobs = 0
    if logprobs is not None:
        _at_most(field, logprobs, limits.max_logprobs)
    return logprobs


def _prompt_logprobs(request: CompletionRequest | ChatCompletionRequest, limits: Limits) -> int | None:
    """Return how many alternatives to compute for each token of the prompt; None is not even its own probability."""
    counts = []
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        counts.append(request.logprobs)
    if request.prompt_logprobs is not None:
        _at_most("prompt_logprobs", request.prompt_logprobs, limits.max_logprobs)
        if request.stream:
            raise RequestError("prompt_logprobs is not allowed with stream", "prompt_logprobs")
        counts.append(request.prompt_logprobs)
    return max(counts, default=None)


def _draft_length(request: GenerationRequest, model: ModelLimits) -> int | None:
    speculation = request.speculative
    if speculation is None:
        return None
    length = speculation.num_speculative_tokens
    if speculation.enabled is False:
        if length:
            raise RequestError(
                f"speculative.num_speculative_tokens is {length}, but speculation is not enabled",
                "speculative.num_speculative_tokens",
            )
        if speculation.fixed:
            raise RequestError("speculative.fixed is true, but speculation is not enabled", "speculative.fixed")
        return 0
    if speculation.fixed:
        if not model.num_speculative_tokens:
            raise RequestError("speculative.fixed is true, but this server makes no drafts", "speculative.fixed")
        length = _or(length, model.num_speculative_tokens)
    if length is not None:
        field = "speculative.num_speculative_tokens"
        _at_most(field, length, model.num_speculative_tokens)
    return length


def _max_tokens_of(request: CompletionRequest | ChatCompletionRequest) -> tuple[int | None, str]:
    """Return how many tokens a request asks for, and the field that says so."""
    if not isinstance(request, ChatCompletionRequest) or request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise RequestError(
            f"max_tokens is {request.max_tokens}, max_completion_tokens {request.max_completion_tokens}; give one",
            "max_tokens",
        )
    return request.max_completion_tokens, "max_completion_tokens"


def _prompt_field(request: CompletionRequest | ChatCompletionRequest) -> str:
    return "prompt" if isinstance(request, CompletionRequest) else "messages"


def _max_tokens(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: Sequence[Sequence[int]],
    model: ModelLimits,
) -> int:
    longest = max(len(prompt) for prompt in prompts)
    room = model.max_model_len - longest
    field = _prompt_field(request)
    if room < 1:
        raise PromptTooLongError(
            f"{field} has {longest:,} tokens, the model takes {model.max_model_len:,} with the text to come", field
        )
    max_tokens, name = _max_tokens_of(request)
    if max_tokens is None:
        default = min(DEFAULT_COMPLETION_TOKENS, room) if isinstance(request, CompletionRequest) else room
        return max(default, min(_or(request.min_tokens, 0), room))
    if max_tokens > room:
        raise PromptTooLongError(
            f"{name} is {max_tokens:,}, {field} has {longest:,} tokens, together more than the model's"
            f" {model.max_model_len:,}",
            name,
        )
    return max_tokens
