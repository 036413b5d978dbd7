"""The requests and replies of a round, as msgpack; nothing is unpickled.

A request's rows are deltas, applied as `token_ids[offset:] = new`. This is commit and rollback in one idempotent
assignment, so a message may be lost, repeated or late without harm.
"""

import msgspec

from engine.errors import PacelineError, RequestError
from engine.params import SamplingParams
from engine.protocols import Draft, SlotRow, Verdict
from engine.stats.drafts import RunAheadStats

MAX_MESSAGE_BYTES = 64 * 2**20


class MalformedMessageError(PacelineError):
    """The bytes are not a valid message."""


class PrefixDelta(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one request since the worker's last reply; `params` are set with offset 0 only."""

    request_id: str
    offset: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams | None = None
    block_offset: int = 0
    block_ids: list[int] = []
    input_length: int = 0


class ProposeEntry(msgspec.Struct, array_like=True, frozen=True):
    """One row of a proposal; `draft_index` names one of the worker's drafts."""

    prefix: PrefixDelta
    num_draft_tokens: int
    draft_index: int = 0


class VerifyEntry(msgspec.Struct, array_like=True, frozen=True):
    """One row of a verification."""

    prefix: PrefixDelta
    start: int
    length: int
    draft: Draft
    slot: SlotRow | None = None


class RoundMessage(msgspec.Struct, array_like=True, frozen=True):
    """The fields of every request; the deadline is relative, because nodes' clocks differ."""

    round: int
    version: int
    deadline_s: float
    released: list[str]


class Propose(RoundMessage, tag="propose", frozen=True):
    """Draft for these rows; with `runs_ahead`, run ahead until the next proposal."""

    rows: list[ProposeEntry]
    runs_ahead: bool = False


class Verify(RoundMessage, tag="verify", frozen=True):
    """Run the target over these rows."""

    rows: list[VerifyEntry]


class FeatureRows(msgspec.Struct, array_like=True, frozen=True):
    """Raw features of a request's tokens from `offset` on; rank 0 holds the features of the first `end` tokens."""

    request_id: str
    offset: int
    end: int
    rows: memoryview


class Features(RoundMessage, tag="features", frozen=True):
    """From rank 0 to the draft worker: keep these features, `row_bytes` in torch's `dtype` for each token.

    Features of a token never change, so messages may come in any order, any number of times.
    """

    dtype: str
    row_bytes: int
    rows: list[FeatureRows]


class Ping(RoundMessage, tag="ping", frozen=True):
    """Reply once all earlier requests are done."""


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The fields of every reply; the worker computed for `compute_s` seconds."""

    round: int
    version: int
    compute_s: float


class Drafts(Reply, tag="drafts", frozen=True):
    """A draft per row.

    Counters: `unprepared` of `Preparation`, `features` of `FeatureStore`, `learning` of `Study`.
    """

    drafts: list[Draft]
    run_ahead: RunAheadStats | None = None
    unprepared: dict[str, int] = {}
    features: dict[str, int] = {}
    learning: dict[str, float] = {}


class Verdicts(Reply, tag="verdicts", frozen=True):
    """A verdict per row."""

    verdicts: list[Verdict]
    unprepared: dict[str, int] = {}


class PrefixMissing(Reply, tag="prefix_missing", frozen=True):
    """The worker lacks tokens before the offsets of these requests, and has changed none of them."""

    request_ids: list[str]


class Failure(Reply, tag="failure", frozen=True):
    """The worker could not compute the request."""

    message: str


class Pong(Reply, tag="pong", frozen=True):
    """All requests before the ping are done."""


AnyRequest = Propose | Verify | Features | Ping
AnyReply = Drafts | Verdicts | PrefixMissing | Failure | Pong

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: RoundMessage | Reply) -> bytes:
    """Return the bytes of a message; raise MalformedMessageError if they exceed `MAX_MESSAGE_BYTES`."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message has {len(payload):,} bytes, the limit is {MAX_MESSAGE_BYTES:,}")
    return payload


def decode_request(payload: bytes) -> AnyRequest:
    """Return the request in `payload`; raise MalformedMessageError if it is not a request."""
    try:
        return _requests.decode(payload)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a request: {error}") from error


def decode_reply(payload: bytes) -> AnyReply:
    """Return the reply in `payload`; raise MalformedMessageError if it is not a reply."""
    try:
        return _replies.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a reply: {error}") from error
