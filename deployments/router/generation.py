"""Generation: a request for tokens, as an Ingress sends it to a Router; and what a Router says of itself."""

import secrets
from dataclasses import dataclass, field, replace

from engine.config import ModelConfig, ModelInfo
from engine.errors import TargetError
from engine.sampling.params import SamplingParams, nth_seed


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request gets no more tokens, where its client or the load is the reason.

    It is a value because Serve logs a traceback for every exception.

    Attributes:
        refused_by: the Router, if another one may take the request; it has not begun here.
    """

    error: Exception
    refused_by: str | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served pair can do."""

    vocab_size: int
    max_model_len: int
    num_speculative_tokens: int
    has_encoder: bool = False
    """Whether prompts go to an encoder, so that the text does not continue them."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a Router serves, for the Ingress and for people.

    Attributes:
        capacity: requests that it holds at most, running and waiting.
    """

    target: ModelInfo
    draft: ModelInfo | None
    """None until the draft has loaded, or if there is none."""
    limits: ModelLimits
    capacity: int
    target_id: str = ""
    """`target_id` of the target."""
    draft_model: str | None = None
    """What drafts, loaded or not."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """How much a Router has to do, and how much of that another one could do.

    Attributes:
        depth: sequences that run or wait.
        num_movable: waiting sequences that may be withdrawn.
        num_movable_of_sender: those of them that came from the Ingress that asks.
        can_serve: whether the target runs.
    """

    router_id: str
    depth: int
    num_movable: int
    num_movable_of_sender: int
    can_serve: bool


class WithdrawnError(TargetError):
    """The request was withdrawn before anything was computed of it, because another Router has less to do."""


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate: `n` of them per prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """The prompts of one HTTP request and how to continue them.

    The id is ours, never the client's: it names KV blocks and the drafter's prefixes.

    Attributes:
        interval_s: how long tokens are gathered after a delivery.
        gathers_first: whether the first tokens are gathered for as long, too; otherwise they come at once.
        drawn_seed: what a request without a seed draws with. It is chosen here, so that another Router that goes on
            with the request draws the same tokens.
        output_token_ids: by choice, the tokens that the Ingress has received from a Router that was lost.
        finished: the choices that have ended already.
        target_id: `target_id` of the model whose text is wanted; None is that of any Router. While a new target is
            rolled out, there are Routers of both.
        rest_s: how long it must not be withdrawn, because it has been lately.
        refused_by: Routers that have refused it; any other one is tried first.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    timeout_s: float
    cache_salt: str | None = None
    interval_s: float = 0.0
    gathers_first: bool = False
    drawn_seed: int = field(default_factory=lambda: secrets.randbits(63))
    output_token_ids: dict[int, list[int]] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    target_id: str | None = None
    rest_s: float = 0.0
    refused_by: frozenset[str] = frozenset()

    @property
    def num_choices(self) -> int:
        """How many sequences to generate."""
        return len(self.prompts) * self.params.n

    def sequences(self) -> list[SequenceRequest]:
        """Return the sequences that have not ended; the id of each ends with the index of its choice in the response.

        Choice j of every prompt draws with the seed plus j, so that a prompt's text does not depend on the other
        prompts of the request. Without a seed, equal prompts get different texts.
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
            sequences.append(SequenceRequest(f"{self.request_id}-{index}", self.prompts[prompt], params, outputs))
        return sequences


def target_id(target: ModelConfig) -> str:
    """Return what tells one target from another."""
    name = target.path if target.revision is None else f"{target.path}@{target.revision}"
    return name if target.quantization == "none" else f"{name}, {target.quantization}"


def request_id_of(sequence_id: str) -> str:
    """Return the id of the request that a sequence belongs to."""
    return sequence_id.rpartition("-")[0]


def choice_index(request_id: str) -> int:
    """Return the index of a sequence's choice in the response."""
    return int(request_id.rpartition("-")[2])
