"""Messages: an Ingress calls a Router with a `Generation`; the Router sends `Outputs`, an `End` and `Report`s back."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from cluster.protocol.messages import MalformedMessageError
from engine.config import CompileProgress, ModelConfig, ModelInfo
from engine.errors import CapacityError, PromptTooLongError, QueueFullError, RequestError, TargetError
from engine.params import SamplingParams, nth_seed
from engine.requests.output import RequestOutput

REPORT_INTERVAL_S = 0.1
HEARTBEAT_S = 1.0  # between unchanged reports; an Ingress ignores old reports
MAX_MOVABLE = 256  # in one report; later reports name further requests
LONGEST_RETRY_S = 60

NUM_REQUESTS = "num_requests"
IS_RECOVERING = "is_recovering"
"""The names under which a Router reports its queue, and whether its target is down, to Serve's autoscaler."""
UTILISATION = "utilisation"
"""The name under which a draft worker reports the share of time in which it drafts."""
DRAFTS = "Drafts"
ANSWER_S = 0.1  # for the last answer of a process that is about to be killed

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (RequestError, PromptTooLongError, CapacityError, QueueFullError, TargetError, TimeoutError)
}
SENT_ERRORS = (RequestError, CapacityError, TargetError, TimeoutError)
"""Errors that an `End` carries. Any other exception is a bug: Serve's call raises it and logs its traceback."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the served pair."""

    vocab_size: int
    max_model_len: int
    num_speculative_tokens: int
    refused: Mapping[str, str] = field(default_factory=dict)
    """Request fields that the target cannot serve, with the reasons."""


@dataclass(frozen=True, slots=True)
class Description:
    """The models that a Router serves, and its capacity: how many requests may run and wait there."""

    target: ModelInfo
    draft: ModelInfo | None  # None until the draft has loaded, or if there is none
    limits: ModelLimits
    capacity: int
    target_id: str = ""
    draft_model: str | None = None  # its path, loaded or not
    head: str | None = None


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate; each prompt has `n`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int]
    predicted_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """The prompts of one HTTP request and how to continue them."""

    request_id: str  # made by the Ingress, never by the client: it names KV blocks and the drafter's prefixes
    prompts: list[list[int]]
    params: SamplingParams
    timeout_s: float
    cache_salt: str | None = None
    interval_s: float = 0.0  # how long tokens are gathered after a delivery
    gathers_first: bool = False  # gather the first tokens for as long, instead of sending them at once
    drawn_seed: int = field(default_factory=lambda: secrets.randbits(63))  # if `params` has none; kept at a resumption
    output_token_ids: dict[int, list[int]] = field(default_factory=dict)  # by choice, received from a lost Router
    finished: frozenset[int] = frozenset()  # choices that have ended
    target_id: str | None = None  # the target that must serve it: during an update there are two; None is any
    refused_by: frozenset[str] = frozenset()  # Routers; other Routers are tried first
    traceparent: str | None = None  # the Ingress's span, if the request is traced
    predicted_token_ids: list[int] = field(default_factory=list)  # the output that the client predicts for every choice
    recorded: dict[int, list[int]] = field(default_factory=dict)  # by choice: the text that `params.audits` checks
    priority: int = 0  # lower starts earlier
    owner: str = ""  # the client's API key, as `guard` names it; owners share a Router's tokens equally
    prefixes: tuple[int, ...] = ()  # `prefix_hashes` of the first prompt, to find a Router that holds its beginning
    has_moved: bool = False  # from a longer queue, to which its prefixes must not lead it back

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_unfinished(self) -> int:
        return self.num_choices - len(self.finished)

    def sequences(self) -> list[SequenceRequest]:
        """Return the sequences that have not ended; their ids end with the index of the choice.

        Choice j of a prompt draws with the request's seed plus j; without a seed, equal prompts get different texts.
        """
        sequences = []
        for index in range(self.num_choices):
            if index in self.finished:
                continue
            prompt, choice = divmod(index, self.params.n)
            seed = self.params.seed
            seed = nth_seed(self.drawn_seed, index) if seed is None else nth_seed(seed, choice)
            params = replace(self.params, n=1, seed=seed)
            outputs = self.output_token_ids.get(index, [])
            sequence_id = f"{self.request_id}-{index}"
            predicted = self.recorded.get(index, self.predicted_token_ids)
            sequences.append(SequenceRequest(sequence_id, self.prompts[prompt], params, outputs, predicted))
        return sequences


def target_id(target: ModelConfig) -> str:
    """Return a name that differs between targets whose texts differ."""
    name = target.path if target.revision is None else f"{target.path}@{target.revision}"
    return name if target.quantization == "none" else f"{name}, {target.quantization}"


def choice_index(sequence_id: str) -> int:
    """Return the index of a sequence's choice in the response."""
    return int(sequence_id.rpartition("-")[2])


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The next outputs of one request, oldest first."""

    request_id: str
    outputs: list[RequestOutput]


class End(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The error that ends one request; `refused_by` is the Router, if another Router may accept the request."""

    request_id: str
    error: str
    message: str
    param: str | None = None
    retry_after_s: int = 1
    refused_by: str | None = None

    @classmethod
    def by(cls, error: Exception, request_id: str, refused_by: str | None = None) -> "End":
        """Return the end of a request by one of `SENT_ERRORS` or a subclass."""
        name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS)
        param = error.param if isinstance(error, RequestError) else None
        retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else 1
        return cls(request_id, name, str(error), param, retry_after_s, refused_by)

    def exception(self) -> Exception:
        """Return the error that the Router raised; raise MalformedMessageError if its name is unknown."""
        error_class = _ERRORS.get(self.error)
        if error_class is None:
            raise MalformedMessageError(f"error is {self.error!r}, expected one of {[*_ERRORS]}")
        error = error_class(self.message)
        if isinstance(error, RequestError):
            error.param = self.param
        if isinstance(error, CapacityError):
            error.retry_after_s = self.retry_after_s
        return error


class Report(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The state of one Router, sent to each Ingress several times a second."""

    router: str  # the replica's id in Serve
    problem: str | None  # why it cannot run rounds now; None if it can
    num_requests: int = 0  # running and waiting, counting each choice of a request
    num_yours: int = 0  # the receiver's share of these; finished choices count until their request has finished
    drain_rate: float = 1.0  # requests finished per second
    num_ingresses: int = 1  # Ingress replicas that have sent it requests
    movable: tuple[str, ...] = ()  # the receiver's requests that have no computation to lose, newest first
    target_id: str = ""
    compiling: CompileProgress | None = None  # None if the workers have compiled, or run eagerly
    prefixes: tuple[int, ...] = ()  # `landmarks` of all prompts since the last report


def retry_after_s(num_requests: int, per_s: float) -> int:
    """Return the seconds until this many requests have finished, between 1 and `LONGEST_RETRY_S`."""
    if num_requests >= per_s * LONGEST_RETRY_S:
        return LONGEST_RETRY_S
    return max(1, math.ceil(num_requests / per_s))


Message = Outputs | End | Report

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """Return a Router's message; raise MalformedMessageError if the bytes hold none."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a message of a Router: {error}") from error
