"""Requests to a Router and its messages, and the time that refused clients are told to wait."""

from dataclasses import replace

import pytest

from cluster.protocol.messages import MalformedMessageError
from deployments.wire import (
    LONGEST_RETRY_S,
    SENT_ERRORS,
    End,
    Generation,
    Outputs,
    Report,
    choice_index,
    decode,
    encode,
    retry_after_s,
    target_id,
)
from engine.config import CompileProgress, ModelConfig
from engine.errors import PromptTooLongError, QueueFullError
from engine.params import MAX_SEED, SamplingParams
from engine.protocols import TokenLogprobs
from engine.requests.output import RequestOutput

LOGPROBS = [TokenLogprobs(-0.5, 1, [3, 4], [-0.5, -1.25])]
OUTPUT = RequestOutput(
    "a-0", [1, 2], "é\ufffd", "stop", "end", LOGPROBS, 3, 1, 4, 2, prompt_logprobs=LOGPROBS, num_predicted_tokens=2
)
PLAIN = RequestOutput("a-1", [7], "", None, None, None, 3, 0, 0, 0)


def test_choices_are_numbered_prompt_by_prompt_and_each_prompt_has_the_seeds_that_it_has_alone() -> None:
    sequences = Generation("cmpl-a-b", [[1], [2]], SamplingParams(n=2, seed=5), 1.0).sequences()
    assert [choice_index(sequence.request_id) for sequence in sequences] == [0, 1, 2, 3]
    assert [sequence.prompt_token_ids for sequence in sequences] == [[1], [1], [2], [2]]
    assert [(sequence.params.n, sequence.params.seed) for sequence in sequences] == [(1, 5), (1, 6)] * 2


@pytest.mark.parametrize("seed", [None, MAX_SEED, -(2**63)])
def test_seeds_differ_and_stay_in_range(seed: int | None) -> None:
    drawn = {
        sequence.params.seed for sequence in Generation("id", [[1]], SamplingParams(n=4, seed=seed), 1.0).sequences()
    }
    assert len(drawn) == 4
    assert all(-(2**63) <= drawn_seed <= MAX_SEED for drawn_seed in drawn)


def test_a_request_that_is_sent_again_draws_with_the_same_seeds() -> None:
    request = Generation("id", [[1], [1]], SamplingParams(n=2), 1.0)
    again = replace(request, request_id="again", output_token_ids={0: [5], 2: [7, 8]}, finished=frozenset([0, 1]))
    first, second = request.sequences(), again.sequences()
    assert [sequence.params for sequence in second] == [sequence.params for sequence in first[2:]]
    rest = [(sequence.request_id, sequence.output_token_ids) for sequence in second]
    assert rest == [("again-2", [7, 8]), ("again-3", [])]


def test_targets_are_told_apart_by_path_revision_and_quantisation() -> None:
    targets = [ModelConfig("/a"), ModelConfig("/b"), ModelConfig("/a", "v1"), ModelConfig("/a", "v2")]
    targets += [ModelConfig("/a", quantization="int8"), ModelConfig("/a", "v1", quantization="int4")]
    assert len(set(map(target_id, targets))) == 6
    assert target_id(ModelConfig("/a", dtype="float32")) == target_id(ModelConfig("/a"))


@pytest.mark.parametrize(
    "message",
    [
        Outputs("a", [OUTPUT, PLAIN, RequestOutput("a-2", [], "", "stop", 5, [], 1, 0, 0, 0)]),
        Report("replica", None, 288, 140, 13.5, 4),
        Report(
            "replica",
            "the target is being restarted",
            288,
            140,
            13.5,
            4,
            ("a", "b"),
            "/models/a",
            CompileProgress(1, 6, 90.5),
        ),
    ],
    ids=["outputs", "report", "problem"],
)
def test_a_message_arrives_as_it_was_sent(message: Outputs | Report) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "error", [PromptTooLongError("long", "messages"), QueueFullError("full"), TimeoutError("late")]
)
def test_an_error_arrives_as_it_was_raised_with_who_refused_and_when_to_retry(error: Exception) -> None:
    assert isinstance(error, SENT_ERRORS)
    if isinstance(error, QueueFullError):
        error.retry_after_s = 17
    end = decode(encode(End.by(error, "a", "router")))
    assert isinstance(end, End)
    again = end.exception()
    assert (type(again), str(again), vars(again), end.refused_by) == (type(error), str(error), vars(error), "router")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", encode(Outputs("a", [PLAIN]))[:-1]])
def test_anything_else_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(payload)


def test_an_error_of_an_unknown_class_is_malformed() -> None:
    with pytest.raises(MalformedMessageError, match="'OSError', expected one of"):
        End("a", "OSError", "").exception()


@pytest.mark.parametrize(
    ("num_requests", "per_s", "seconds"),
    [(0, 5.0, 1), (11, 5.0, 3), (288, 5.0, 58), (10_000, 5.0, LONGEST_RETRY_S), (1, 0.0, LONGEST_RETRY_S)],
)
def test_clients_retry_when_the_queue_has_drained(num_requests: int, per_s: float, seconds: int) -> None:
    assert retry_after_s(num_requests, per_s) == seconds
