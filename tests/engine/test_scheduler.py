"""Who gets a row of the next round, how long a draft, and which blocks; no model is needed to decide that."""

from dataclasses import replace

from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.params import SamplingParams
from engine.protocols import Request, TokenLogprobs, Verdict, chain
from engine.requests.sequence import Sequence
from engine.scheduler import Scheduler

BLOCK = 4
END = 9


def make_scheduler(*, num_blocks=100, max_model_len=1000, **settings):
    config = EngineConfig(**({"block_size": BLOCK, "max_num_batched_tokens": 64} | settings))
    return Scheduler(config, num_blocks, max_model_len)


def make_sequence(request_id, prompt, *, salt=b"", **params):
    params = SamplingParams(**({"max_tokens": 100} | params))
    return Sequence(Request(request_id, list(prompt), len(prompt), params, salt), frozenset({END}), None)


def add(scheduler, request_id, prompt, **settings):
    sequence = make_sequence(request_id, prompt, **settings)
    scheduler.add(sequence)
    return sequence


def commit(scheduler, rows, *, num_accepted=0, token=7):
    """Commit a round in which each row that reaches its tip has so many draft tokens accepted, all of them `token`."""
    verdicts = []
    for row in rows:
        accepted = min(num_accepted, row.num_draft_tokens)
        drafted = row.verify(chain([token] * row.num_draft_tokens))
        tokens = [token] * (accepted + 1)
        verdicts.append(
            Verdict(tokens, list(range(accepted)), draft=drafted.draft) if drafted.reaches_tip else Verdict()
        )
    return [output for _, output in scheduler.commit(rows, verdicts)]


def run_round(scheduler, k=0, **settings):
    rows = scheduler.next_batch(Plan(k))
    commit(scheduler, rows, **settings)
    return rows


def name(sequence):
    return sequence.request.request_id


def tokens(sequence):
    """A request's prompt and what was committed."""
    return sequence.request.token_ids


def shares(rows):
    """What each row of a round computes: its request, its tokens, its draft tokens."""
    return [(row.request.request_id, row.length, row.num_draft_tokens) for row in rows]


def names(queue):
    return [name(sequence) for sequence in queue]


# Who shares the round.


def test_accepted_tokens_beyond_the_end_of_a_text_are_not_counted():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", [1, 2], adapter="sql")
    run_round(scheduler)
    run_round(scheduler, 4, num_accepted=4, token=END)
    assert (sequence.finish_reason, scheduler.stats.num_draft_tokens) == ("stop", 4)
    assert scheduler.stats.num_accepted_tokens_per_pos == [1, 0, 0, 0]
    assert scheduler.stats.num_tokens_by_adapter == {("sql", "verified"): 4, ("sql", "accepted"): 1}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_has_no_draft_meanwhile():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    add(scheduler, "a", range(12))
    assert [shares(run_round(scheduler, 3)) for _ in range(4)] == [
        [("a", 5, 0)],
        [("a", 5, 0)],
        [("a", 2, 0)],
        [("a", 1, 3)],
    ]


def test_after_a_lost_round_decoding_requests_come_before_prompts():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "prompt", range(5))
    add(scheduler, "decoding", [1])
    rows = scheduler.next_batch(Plan(2))
    assert shares(rows) == [("prompt", 5, 0), ("decoding", 1, 2)]
    scheduler.withdraw(rows)
    assert shares(scheduler.next_batch(Plan(2))) == [("decoding", 1, 2), ("prompt", 5, 0)]


def test_no_round_is_larger_than_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    for letter in "abc":
        add(scheduler, letter, [1, 2])
    assert shares(run_round(scheduler, 4)) == [("a", 2, 0), ("b", 2, 0), ("c", 2, 0)]
    assert shares(run_round(scheduler, 4)) == [("a", 1, 4), ("b", 1, 1)]
    add(scheduler, "d", [1])
    assert shares(run_round(scheduler, 1)) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1), ("d", 1, 0)]


def test_a_prompt_that_waits_for_blocks_does_not_count_until_it_is_admitted():
    scheduler = make_scheduler(num_blocks=1 + 3)
    add(scheduler, "a", range(6))
    add(scheduler, "b", range(10, 20))
    add(scheduler, "c", [1])  # which does not overtake
    assert shares(run_round(scheduler)) == [("a", 6, 0)]
    assert names(scheduler.waiting) == ["b", "c"]
    assert not scheduler.has_prompts
    assert not scheduler.waiting.first.block_ids
    scheduler.abort("a")
    assert shares(run_round(scheduler)) == [("b", 10, 0)]


# How long a draft may be.


def test_a_draft_stays_within_the_context_length():
    scheduler = make_scheduler(max_model_len=10)
    add(scheduler, "a", range(6))
    run_round(scheduler)
    assert shares(run_round(scheduler, 9)) == [("a", 1, 2)]  # 7 committed, 2 drafted, 1 of the target's own
    assert shares(run_round(scheduler, 9)) == [("a", 1, 1)]
    assert shares(run_round(scheduler, 9)) == [("a", 1, 0)]


# Which blocks.


def test_long_copies_take_no_more_logits_than_a_full_batch_would():
    """Four places of three logits each: a prediction's copies get what empty places leave, and nobody less than k."""
    scheduler = make_scheduler(max_num_seqs=4, num_speculative_tokens=2)
    for count, lengths in ((1, [9]), (2, [8, 2]), (3, [5, 2, 2]), (4, [2, 2, 2, 2])):
        add(scheduler, str(count), [5])
        run_round(scheduler)
        rows = scheduler.next_batch(Plan(2, copies={str(nth): 9 for nth in range(1, 5)}))
        assert [row.num_draft_tokens for row in rows] == lengths
        scheduler.withdraw(rows)


def test_the_youngest_request_is_preempted_for_older_ones_and_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=1 + 4)
    old, young = add(scheduler, "old", range(7)), add(scheduler, "young", range(10, 17))
    run_round(scheduler)
    assert scheduler.pool.num_free == 0
    run_round(scheduler)  # both tips are the 8th token; another one needs a third block
    assert shares(scheduler.next_batch(Plan(0))) == [("old", 1, 0)]
    assert names(scheduler.running) == ["old"]
    assert names(scheduler.waiting) == ["young"]
    assert len(old.block_ids) == 3
    assert (list(young.block_ids), young.digests, young.num_computed) == ([], [], 0)
    assert tokens(young) == [*range(10, 17), 7, 7]
    assert scheduler.stats.num_preemptions == 1


def test_a_preempted_request_is_the_first_to_come_back():
    scheduler = make_scheduler(num_blocks=1 + 4)
    add(scheduler, "old", range(7))
    young = add(scheduler, "young", range(10, 17))
    run_round(scheduler)
    add(scheduler, "new", [1])
    run_round(scheduler)
    run_round(scheduler)
    assert names(scheduler.waiting) == ["young", "new"]
    scheduler.abort("old")
    # Its first block can still be found, the rest is computed again; that is no cached prompt, and no new one.
    assert shares(run_round(scheduler)) == [("young", 5, 0), ("new", 1, 0)]
    assert young.num_cached == 0
    assert scheduler.stats.num_prompt_tokens == 7 + 7 + 1


# What others may share.


# What a verdict changes.


def test_a_round_in_flight_changes_nothing_of_a_request_that_was_aborted_meanwhile():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", [1, 2])
    other = add(scheduler, "b", [1, 2])
    rows = scheduler.next_batch(Plan(0))
    scheduler.abort("a")
    again = add(scheduler, "a", [1, 2])
    outputs = commit(scheduler, rows)
    assert [output.request_id for output in outputs] == ["b"]
    assert tokens(sequence) == [1, 2]
    assert tokens(again) == [1, 2]
    assert scheduler.pool.num_free == 99 - len(other.block_ids)


def test_log_probabilities_of_a_chunk_that_is_computed_again_are_not_doubled():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    add(scheduler, "a", range(5), prompt_logprobs=0)
    entries = [TokenLogprobs(-float(i), 1, [], []) for i in range(1, 5)]
    scheduler.commit(scheduler.next_batch(Plan(0)), [Verdict(prompt_logprobs=entries[:3])])
    scheduler.reset()
    scheduler.commit(scheduler.next_batch(Plan(0)), [Verdict(prompt_logprobs=entries[:3])])
    ((_, output),) = scheduler.commit(scheduler.next_batch(Plan(0)), [Verdict([7], prompt_logprobs=entries[3:])])
    assert output.prompt_logprobs == entries


# When the memory behind the blocks is lost.


def test_after_a_reset_every_request_waits_in_its_old_order_and_keeps_its_tokens():
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = [add(scheduler, letter, range(6)) for letter in "abc"]
    run_round(scheduler)
    scheduler.reset()
    assert names(scheduler.waiting) == ["a", "b", "c"]
    assert scheduler.running == []
    assert [tokens(sequence) for sequence in sequences] == [[*range(6), 7], [*range(6), 7], list(range(6))]
    assert scheduler.pool.num_free == 99
    assert shares(scheduler.next_batch(Plan(0))) == [("a", 7, 0), ("b", 7, 0)]
    assert scheduler.stats.num_prompt_tokens == 12


# Two rounds in flight.


def make_cohorts(num_requests, **settings):
    """A scheduler of two cohorts, whose requests decode."""
    scheduler = make_scheduler(**settings)
    for nth in range(num_requests):
        add(scheduler, str(nth), [nth + 1])
    run_round(scheduler)
    scheduler.num_cohorts = 2
    return scheduler


def alternate(scheduler, num_rounds, between=lambda: None):
    """Begin each round before the one before it has ended; return the names of the rows of each."""
    batches, earlier = [], scheduler.next_batch(Plan(0))
    for _ in range(num_rounds):
        between()
        later = scheduler.next_batch(Plan(0))
        commit(scheduler, earlier)
        batches.append([row.request.request_id for row in earlier])
        earlier = later
    scheduler.withdraw(earlier)
    return batches


def test_two_cohorts_take_equal_shares_in_turn():
    batches = alternate(make_cohorts(7), 6)
    assert [len(batch) for batch in batches] == [4, 3] * 3
    assert batches[0::2] == [["0", "1", "2", "3"]] * 3
    assert batches[1::2] == [["4", "5", "6"]] * 3
    assert alternate(make_cohorts(1), 5) == [["0"], [], ["0"], [], ["0"]]


def test_a_request_that_the_budget_left_out_comes_first_in_the_next_round():
    scheduler = make_cohorts(4, max_num_batched_tokens=4)
    first = scheduler.next_batch(Plan(3))
    assert shares(first) == [("0", 1, 3)]
    second = scheduler.next_batch(Plan(3))
    assert shares(second) == [("1", 1, 3)]
    commit(scheduler, first)
    third = scheduler.next_batch(Plan(3))
    assert shares(third) == [("2", 1, 3)]
    commit(scheduler, second)
    assert shares(scheduler.next_batch(Plan(3))) == [("3", 1, 3)]


def test_a_long_prompt_that_fills_a_round_does_not_stop_the_other_cohort():
    scheduler = make_cohorts(2, max_num_batched_tokens=8)
    add(scheduler, "long", range(30))
    batches = alternate(scheduler, 8)
    assert all("long" in batch for batch in batches[0::2]) or all("long" in batch for batch in batches[1::2])
    for nth in "01":
        assert sum(nth in batch for batch in batches) >= 3
    assert scheduler.running[-1].is_decoding


def test_a_row_that_waits_for_blocks_in_flight_gets_them_before_any_request_is_admitted():
    """The oldest waits for the youngest, which is in flight; what a third gave up is for the oldest alone."""
    scheduler = make_scheduler(num_blocks=1 + 6)
    old, middle, _ = (add(scheduler, name, range(start, start + 6)) for name, start in (("o", 0), ("m", 10), ("y", 20)))
    run_round(scheduler)
    scheduler.num_cohorts, scheduler.config = 2, replace(scheduler.config, max_num_batched_tokens=1)
    old.last_round = middle.last_round = 2  # so that the youngest comes first
    flight = scheduler.next_batch(Plan(0))
    assert [row.request.request_id for row in flight] == ["y"]
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=64)
    # 7 tokens and 12 more make 5 blocks; two are its own, the middle one's two do not do.
    assert scheduler.next_batch(Plan(0, copies={"o": 12})) == []
    assert (names(scheduler.running), names(scheduler.waiting)) == (["o", "y"], ["m"])
    commit(scheduler, flight)
    assert [row.request.request_id for row in scheduler.next_batch(Plan(0, copies={"o": 12}))] == ["o"]
