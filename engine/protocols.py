"""The two roles of a round, Drafter and Verifier, and the data that they exchange with the engine.

Words: *draft tokens* are proposed and not yet verified; *accepted* ones were kept; *recovered* is the token the target
puts in place of the first rejected one; *bonus* is the token after a fully accepted draft; *committed* tokens (accepted
plus the recovered or bonus one) are final and visible.

A draft is a tree: `parents[i]` is the index of node i's parent, -1 the committed tip, and `parents[i] < i`. In a chain,
`parents[i] == i - 1`. An empty draft is ordinary decoding, on the same path.
"""

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from engine.params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft of one request.

    `top_ids` and `top_probs` ([n][m] each) are the distributions that the tokens were sampled from, restricted to the
    drafter's top m tokens, whose probabilities sum to 1. Only a rule that needs draft rows gets them.

    `is_predicted` says that the tokens are a copy of the output that the client predicts.

    `num_deferred` tokens are left to the target, which drafts them before it verifies; then the draft holds none.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    top_ids: list[list[int]] | None = None
    top_probs: list[list[float]] | None = None
    num_deferred: int = 0
    is_predicted: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))


def chain(token_ids: list[int]) -> Draft:
    """Return a draft that is a chain."""
    return Draft(token_ids, list(range(-1, len(token_ids) - 1)))


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as the engine, drafters and verifiers see it.

    Exactly one owner appends to `token_ids`: `Sequence.commit` where the engine runs, `PrefixTable.apply` in a worker.
    Everything else only reads the list, and copies it to keep it after the call.

    Attributes:
        token_ids: the prompt and the committed output, never a draft token.
        prompt_length: how many of them are the prompt.
        salt: requests share cached blocks and outputs only with requests of the same salt; empty in workers.
        input_length: how many of the first tokens are a model's input, which one pass must compute together; 0 for
            models whose text continues the prompt. After an input, the prompt's last token starts the text.
        predicted_token_ids: the output that the client predicts, whole or in part; empty in workers.
    """

    request_id: str
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    salt: bytes = b""
    input_length: int = 0
    predicted_token_ids: Sequence[int] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the client sent: after an input, the prompt has one more, which starts the text."""
        return self.input_length or self.prompt_length

    @property
    def num_output_tokens(self) -> int:
        """How many tokens after the prompt are committed."""
        return len(self.token_ids) - self.prompt_length

    @property
    def output(self) -> list[int]:
        """The committed tokens after the prompt, as a new list."""
        return self.token_ids[self.prompt_length :]

    def copy(self) -> "Request":
        """Return the request as it is now: tokens that its owner appends later do not appear in the copy."""
        return replace(self, token_ids=list(self.token_ids))


class SlotRow(NamedTuple):
    """Where a row has what its cache keeps beside keys and values: one slot a request, which cannot be cut.

    Attributes:
        slot: the request's own slot; the pass leaves there what stands for the row up to its last committed token.
        source: the slot that the pass starts from: its own, a cached one, or 0 for none of the context.
        num_folded: how many of the source's stored draft tokens were accepted, before `start`.
        saves: (place, slot): what stands for so many tokens of the context is also written to that slot.
    """

    slot: int
    source: int
    num_folded: int = 0
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class ProposeRow:
    """One row of a proposal: a request, and the longest draft that it may get.

    `runs_ahead` lets a drafter that is able to prepare the request's next draft while the target verifies.
    """

    request: Request
    num_draft_tokens: int
    runs_ahead: bool = field(default=False, kw_only=True)


@dataclass(slots=True)
class ScheduledRow(ProposeRow):
    """One request in a round, before its draft is known; see `VerifyRow`."""

    start: int
    length: int
    block_ids: Sequence[int]
    slot: SlotRow | None = None

    def verify(self, draft: Draft) -> "VerifyRow":
        """Return the row of the verification of a draft."""
        return VerifyRow(self.request, self.start, self.length, self.block_ids, draft, self.slot)


@dataclass(slots=True)
class VerifyRow:
    """One row of a verification.

    The forward pass computes `token_ids[start : start + length]` of the request and, if that reaches the committed tip,
    the draft after it; only then does the row get tokens. `block_ids` is the request's whole block table; the table of
    a later round is the same object with more blocks, or another object.
    """

    request: Request
    start: int
    length: int
    block_ids: Sequence[int]
    draft: Draft
    slot: SlotRow | None = None

    @property
    def reaches_tip(self) -> bool:
        """Whether this pass computes the last committed token, so that a new one can be drawn."""
        return self.start + self.length == len(self.request.token_ids)

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens whose log probabilities this pass computes, each at the token before it."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.start + self.length, self.request.prompt_length - 1) - self.start)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token, with its rank (1 = most likely), and of the likeliest tokens."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens one request commits in a round: `num_accepted` draft tokens, and one that the target draws.

    `path` holds the accepted draft nodes, root first: their KV entries are kept. `token_ids` are empty while the prompt
    is still being computed. `prompt_logprobs` belong to the prompt tokens from `start + 1` on. `draft` is the draft
    that was judged, whoever made it. An `error` ends the request, and comes without tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    error: str = ""

    @property
    def num_accepted(self) -> int:
        """How many draft tokens were kept."""
        return len(self.path)


FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """What one round did for one request: the text of each committed token, and the draft that was verified.

    The texts add up to the output's: a character of several tokens belongs to the last of them. `path` holds the
    accepted nodes of the draft, root first.
    """

    texts: list[str]
    path: list[int]
    draft_token_ids: list[int]
    parents: list[int]


@dataclass(slots=True)
class RequestOutput:
    """The tokens and text that one round added to one request.

    `text` can lag behind `token_ids`: text that may still become a stop string or a whole character comes later. After
    an error, `stop_reason` is its message.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One entry per prompt token from the second on; only in the first output, and only if requested."""
    trace: RoundTrace | None = None
    """Only if requested."""
    num_predicted_tokens: int = 0
    """Accepted draft tokens that the client predicted."""


class Drafter(Protocol):
    """Proposes draft tokens; may always answer with empty drafts, and never raises for its own failures."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return one draft per row, of at most `num_draft_tokens` nodes each."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


class Verifier(Protocol):
    """Runs the target over committed tips and drafts, and decides."""

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        """Return one verdict per row.

        Raises:
            TargetError: the round did not finish; it can be run again from the committed tokens.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


Overlap = Literal["none", "ahead", "alternate"]
"""What a drafter does while the target verifies: nothing; drafts for the likeliest verdicts; or drafts for the other of
two cohorts of requests, whose rounds alternate."""


@runtime_checkable
class PlansCopies(Protocol):
    """A drafter that copies in some rows, and knows before a round which ones and how many tokens."""

    def plan_copies(self, rows: Sequence[ProposeRow], expected: Mapping[str, float]) -> Mapping[str, int]:
        """Return the lengths of the next round's copies by request id, for the rows that will copy.

        Args:
            rows: the requests that decode, with the longest draft that each may get.
            expected: how many tokens of the draft that a row gets otherwise are expected to be accepted, by request id.
        """
        ...


class TargetDrafter(Protocol):
    """Drafts in the target's process, on all of its ranks, right before the target verifies."""

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Return the rows with drafts in place of deferred ones, alike on all ranks; one rank `decides` the tokens."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return an empty draft for every row."""
        return [NO_DRAFT] * len(rows)

    def release(self, request_id: str) -> None:
        """Do nothing: no request is held."""


class DeferringDrafter(NoDrafter):
    """Leaves every draft to the target."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return per row how many tokens the target is to draft."""
        return [Draft(num_deferred=row.num_draft_tokens) for row in rows]


def run_in_process(work: Coroutine[Any, Any, T] | Generator[None, None, T]) -> T:
    """Run a coroutine that never waits, or a generator that yields between passes, and return its result.

    Unlike `asyncio.run`, this works inside a running event loop, as in a notebook. Raises RuntimeError if it waited.
    """
    try:
        while work.send(None) is None:
            pass
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("a drafter or verifier of this process waited for something; it must only compute")
