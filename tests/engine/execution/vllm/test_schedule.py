"""Rounds as vLLM's runner hears of them: whatever it does not know, or knows otherwise, is announced anew."""

import pytest

pytest.importorskip("vllm", reason="`make vllm` has it")

from engine.execution.vllm.schedule import Schedule
from engine.params import SamplingParams
from engine.protocols import Request, VerifyRow, chain


def row(request, start, length, block_ids, draft=()):
    return VerifyRow(request, start, length, block_ids, chain([*draft]))


def test_a_request_is_announced_once_and_then_only_what_is_new():
    schedule, request = Schedule(), Request("a", [5, 6, 7], 3, SamplingParams())
    first = schedule.plan([row(request, 0, 3, [1])]).output
    [new] = first.scheduled_new_reqs
    assert (new.prompt_token_ids, new.block_ids, new.num_computed_tokens) == ([5, 6, 7], ([1],), 0)
    request.token_ids.extend([8, 9])
    assert new.prompt_token_ids == [5, 6, 7], "a copy"
    planned = schedule.plan([row(request, 4, 1, [1, 4], [3, 3])])
    known = planned.output.scheduled_cached_reqs
    assert planned.added == {"a": [8, 9]}
    assert (known.req_ids, known.new_block_ids, known.num_computed_tokens) == (["a"], [([4],)], [4])
    assert known.num_output_tokens == [2]
    assert planned.output.num_scheduled_tokens == {"a": 3}
    assert planned.output.scheduled_spec_decode_tokens == {"a": [3, 3]}
    again = schedule.plan([row(request, 4, 1, [1, 4])])
    assert again.added == {"a": []}
    assert again.output.scheduled_cached_reqs.new_block_ids == [None]


@pytest.mark.parametrize(("token_ids", "block_ids"), [([5, 6, 7, 8], [2]), ([5, 6, 7], [1]), ([5, 6], [1, 3])], ids=str)
def test_other_blocks_fewer_blocks_or_fewer_tokens_end_a_request_and_announce_it(token_ids, block_ids):
    schedule = Schedule()
    schedule.plan([row(Request("a", [5, 6, 7], 3, SamplingParams()), 0, 3, [1, 3])])
    output = schedule.plan([row(Request("a", token_ids, 2, SamplingParams()), 1, 1, block_ids)]).output
    assert output.finished_req_ids == {"a"}
    [new] = output.scheduled_new_reqs
    assert (new.prompt_token_ids, new.block_ids, new.num_computed_tokens) == (token_ids, (block_ids,), 1)
    assert output.scheduled_cached_reqs.req_ids == []


def test_a_released_request_ends_in_the_next_round_and_may_come_back():
    schedule, request = Schedule(), Request("a", [5, 6, 7], 3, SamplingParams())
    schedule.release("a")
    schedule.plan([row(request, 0, 3, [1])])
    schedule.release("a")
    output = schedule.plan([row(request, 0, 3, [1])]).output
    assert (output.finished_req_ids, len(output.scheduled_new_reqs)) == ({"a"}, 1)
    assert schedule.plan([row(request, 2, 1, [1])]).output.finished_req_ids == set()
