"""The two roles of a round, Drafter and Verifier, and the data that they exchange with the engine.

Words: *draft tokens* are proposed and not yet verified; *accepted* draft tokens were kept; the *recovered* token
replaces the first rejected token; the *bonus* token follows a fully accepted draft; *committed* tokens (accepted plus
recovered or bonus) are final and visible. The *tip* is the last committed token.
"""

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from engine.params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft of one request, a tree; an empty draft is plain decoding.

    Attributes:
        parents: the index of each node's parent, which is less than the node's; -1 is the committed tip.
        top_ids, top_probs: [n][m], the distributions that the tokens were sampled from, restricted to the drafter's
            top m tokens, whose probabilities sum to 1. None unless the verification rule needs them.
        num_deferred: how many tokens the target drafts itself before it verifies; then `token_ids` is empty.
        is_predicted: whether the tokens are copied from the output that the client predicts.
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
    """Return a draft in which each token follows the token before it."""
    return Draft(token_ids, list(range(-1, len(token_ids) - 1)))


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as the engine, drafters and verifiers see it.

    Attributes:
        token_ids: the prompt and the committed output, never a draft token. Only the owner appends to it: `Sequence`
            in the engine, `PrefixTable` in a worker. All others copy the list if they keep it after the call.
        prompt_length: how many tokens are the prompt.
        salt: requests share cached blocks only with requests of the same salt; empty in workers.
        input_length: the number of first tokens that an encoder reads, all in one pass; 0 without an encoder. With an
            encoder, the prompt's last token is the start token of the text.
        predicted_token_ids: the output that the client predicts; empty in workers.
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
        """How many tokens the client sent: the prompt, without an encoder-decoder's start token."""
        return self.input_length or self.prompt_length

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    def copy(self) -> "Request":
        """Return a copy with its own `token_ids`."""
        return replace(self, token_ids=list(self.token_ids))


class SlotRow(NamedTuple):
    """Where a row's recurrent state or encoder output is stored: a slot per request.

    Attributes:
        slot: the request's slot; the pass stores the state there, up to the last committed token.
        source: the slot that the pass starts from: the request's, a cached slot, or 0 at the start of the context.
        num_folded: how many of the draft tokens stored in `source` were accepted; the state at `start` includes them.
        saves: pairs (n, slot): the state after the first n tokens is also written to that slot.
    """

    slot: int
    source: int
    num_folded: int = 0
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class ProposeRow:
    """A request, the longest draft that it may get, and whether a drafter may run ahead for it.

    `draft_index` names the draft model, if there are several.
    """

    request: Request
    num_draft_tokens: int
    runs_ahead: bool = field(default=False, kw_only=True)
    draft_index: int = field(default=0, kw_only=True)


@dataclass(slots=True)
class ScheduledRow(ProposeRow):
    """A request in a round, before its draft is known; see `VerifyRow`."""

    start: int
    length: int
    block_ids: Sequence[int]
    slot: SlotRow | None = None

    def verify(self, draft: Draft) -> "VerifyRow":
        return VerifyRow(self.request, self.start, self.length, self.block_ids, draft, self.slot)


@dataclass(slots=True)
class VerifyRow:
    """One row of a verification.

    The pass computes `token_ids[start : start + length]` of the request. If that reaches the tip, the pass also
    computes the draft, and the row gets tokens. `block_ids` is the request's whole block table; later rounds extend the
    same object, or replace it.
    """

    request: Request
    start: int
    length: int
    block_ids: Sequence[int]
    draft: Draft
    slot: SlotRow | None = None

    @property
    def reaches_tip(self) -> bool:
        """Whether this pass computes the last committed token, so that it draws new tokens."""
        return self.start + self.length == len(self.request.token_ids)

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt tokens whose log probabilities this pass computes."""
        if self.request.params.prompt_logprobs is None:
            return 0
        return max(0, min(self.start + self.length, self.request.prompt_length - 1) - self.start)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at a position: the token's, its rank (1 = most likely), and the likeliest tokens'."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Difference(NamedTuple):
    """Where the target writes another token than the text that it audits.

    Attributes:
        position: of the token in the output.
        token_id: the target's token.
        margin: by how much the target's token scores higher, in log probability plus noise; inf if the text's token
            cannot be drawn.
    """

    position: int
    token_id: int
    margin: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a request commits in a round: the accepted draft tokens, and a recovered or bonus token.

    Attributes:
        token_ids: empty while the prompt is not computed to its end.
        path: the accepted draft nodes, root first; their KV entries are kept.
        prompt_logprobs: for the prompt tokens from `start + 1` on.
        draft: the draft that was verified.
        error: ends the request, without tokens.
        differences: of a request that audits, whose whole draft is committed.
    """

    token_ids: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    error: str = ""
    differences: list[Difference] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        return len(self.path)


class Drafter(Protocol):
    """Proposes draft tokens. A drafter that fails returns empty drafts; it does not raise."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a draft of at most `num_draft_tokens` nodes for each row."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


class Verifier(Protocol):
    """Runs the target over committed tokens and drafts, and decides which draft tokens to accept."""

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        """Return a verdict for each row.

        Raises:
            TargetError: the round did not finish; it can be run again from the committed tokens.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


Overlap = Literal["none", "ahead", "alternate"]
"""What a drafter does while the target verifies: nothing; run-ahead: it drafts for the likeliest verdicts; alternation:
it drafts for a half of the requests, a cohort, while the target verifies the other cohort."""


@runtime_checkable
class PlansCopies(Protocol):
    """A drafter that can copy earlier tokens, and knows before a round for which requests and how many."""

    def plan_copies(self, rows: Sequence[ProposeRow], expected: Mapping[str, float]) -> Mapping[str, int]:
        """Return the lengths of the next round's copies by request id; other requests get ordinary drafts.

        Args:
            rows: the requests that decode, with the longest draft that each may get.
            expected: the expected number of accepted tokens of an ordinary draft, by request id.
        """
        ...


class TargetDrafter(Protocol):
    """Drafts in the target's process, on all of its ranks, right before the target verifies."""

    def draft(self, rows: Sequence[VerifyRow], *, decides: bool) -> list[VerifyRow]:
        """Return the rows with their deferred drafts made, equal on all ranks; one rank `decides` the tokens."""
        ...


class NoDrafter:
    """Proposes nothing: plain decoding."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        return [NO_DRAFT] * len(rows)

    def release(self, request_id: str) -> None:
        """Do nothing: no request is held."""


class DeferringDrafter(NoDrafter):
    """Leaves every draft to the target."""

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        """Return a draft for each row that says only how many tokens the target is to draft."""
        return [Draft(num_deferred=row.num_draft_tokens) for row in rows]


def run_in_process(work: Coroutine[Any, Any, T] | Generator[None, None, T]) -> T:
    """Run a coroutine that never waits, or a generator that yields between passes, and return its result.

    Unlike `asyncio.run`, it works inside a running event loop. Raises RuntimeError if the coroutine waits.
    """
    try:
        while work.send(None) is None:
            pass
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("a drafter or verifier of this process waited for something; it must only compute")
