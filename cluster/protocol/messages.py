"""Everything that travels in a round, as msgpack; nothing is ever unpickled.

A request carries the round it belongs to, the version of the group it is meant for, the seconds its sender will wait,
and the ids that have ended since the last one. Its rows hold deltas: `token_ids[offset:] = new` is commit and rollback
in one idempotent line, so a request may be lost, repeated or arrive late without harm.
"""

import msgspec

from engine.errors import PacelineError, RequestError
from engine.protocols import Draft, Verdict
from engine.sampling.params import SamplingParams
from engine.stats import RunAheadStats

MAX_MESSAGE_BYTES = 64 * 2**20


class MalformedMessageError(PacelineError):
    """Bytes that are no message of this protocol."""


class PrefixDelta(msgspec.Struct, array_like=True, frozen=True):
    """What changed in one request since its receiver last answered; `params` come with offset 0 only."""

    request_id: str
    offset: int
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams | None = None
    block_offset: int = 0
    block_ids: list[int] = []


class ProposeEntry(msgspec.Struct, array_like=True, frozen=True):
    """One row of a proposal."""

    prefix: PrefixDelta
    num_draft_tokens: int


class VerifyEntry(msgspec.Struct, array_like=True, frozen=True):
    """One row of a verification."""

    prefix: PrefixDelta
    start: int
    length: int
    draft: Draft


class RoundMessage(msgspec.Struct, array_like=True, frozen=True):
    """What every request holds. Deadlines are relative: clocks of different nodes are never compared."""

    round: int
    version: int
    deadline_s: float
    released: list[str]


class Propose(RoundMessage, tag="propose", frozen=True):
    """Draft for these rows."""

    rows: list[ProposeEntry]


class Verify(RoundMessage, tag="verify", frozen=True):
    """Run the target over these rows."""

    rows: list[VerifyEntry]


class Ping(RoundMessage, tag="ping", frozen=True):
    """Answer when everything before this is done."""


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """What every reply holds; `compute_s` is the worker's own time, so that the rest can be told apart."""

    round: int
    version: int
    compute_s: float


class Drafts(Reply, tag="drafts", frozen=True):
    """One draft per row; from a drafter that runs ahead also what that was worth so far."""

    drafts: list[Draft]
    run_ahead: RunAheadStats | None = None


class Verdicts(Reply, tag="verdicts", frozen=True):
    """One verdict per row."""

    verdicts: list[Verdict]


class PrefixMissing(Reply, tag="prefix_missing", frozen=True):
    """The worker does not hold the tokens before the offset of these requests; nothing was changed."""

    request_ids: list[str]


class Failure(Reply, tag="failure", frozen=True):
    """The worker could not compute the request."""

    message: str


class Pong(Reply, tag="pong", frozen=True):
    """Everything before the ping is done."""


AnyRequest = Propose | Verify | Ping
AnyReply = Drafts | Verdicts | PrefixMissing | Failure | Pong

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: RoundMessage | Reply) -> bytes:
    """Return the bytes of a message.

    Raises:
        MalformedMessageError: the message is larger than any peer would take.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message has {len(payload):,} bytes, the limit is {MAX_MESSAGE_BYTES:,}")
    return payload


def decode_request(payload: bytes) -> AnyRequest:
    """Return the request in `payload`.

    Raises:
        MalformedMessageError: it is none.
    """
    try:
        return _requests.decode(payload)
    except (msgspec.DecodeError, RequestError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a request: {error}") from error


def decode_reply(payload: bytes) -> AnyReply:
    """Return the reply in `payload`.

    Raises:
        MalformedMessageError: it is none.
    """
    try:
        return _replies.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"not a reply: {error}") from error
