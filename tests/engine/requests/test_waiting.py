"""Which waiting request starts next, with whom an owner shares, and who may still join a full queue."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.errors import QueueFullError
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Request, Verdict
from engine.requests.sequence import Sequence
from engine.requests.waiting import WaitingQueue
from engine.scheduler import Scheduler
from tests.engine.running import make_engine, run
from tests.engine.test_engine import MODEL, VOCAB


def make_sequence(request_id, owner="", *, priority=0, length=4, max_tokens=100):
    request = Request(request_id, [1] * length, length, SamplingParams(max_tokens=max_tokens))
    return Sequence(request, frozenset(), None, priority=priority, owner=owner)


def begun(request_id, **settings):
    sequence = make_sequence(request_id, **settings)
    sequence.resume([3])
    return sequence


def queue_of(*sequences, limit=1000):
    queue = WaitingQueue(limit)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def start(queue, num_tokens=10):
    """Start the next request, and count so many tokens for its owner."""
    sequence = queue.first
    queue.remove(sequence)
    queue.charge(sequence, num_tokens)
    return sequence.request.request_id


def order(queue):
    return [start(queue) for _ in range(len(queue))]


# Which request starts next.


def test_of_one_owner_a_lower_priority_starts_earlier_and_equal_ones_in_their_order():
    levels = {"a": 0, "b": 1, "c": -1, "d": 0, "e": -1, "f": 1}
    queue = queue_of(*(make_sequence(name, priority=level) for name, level in levels.items()))
    assert order(queue) == ["c", "e", "a", "d", "b", "f"]


def test_begun_requests_keep_their_place_before_any_priority_and_share():
    queue = queue_of(
        make_sequence("new", priority=-5), begun("other engine's 1"), begun("other engine's 2", priority=9)
    )
    for name in ("younger", "older"):  # the youngest is preempted first
        queue.put_back(make_sequence(name, owner="heavy"))
    queue.charge(make_sequence("", owner="heavy"), 10**6)
    assert order(queue) == ["older", "younger", "other engine's 1", "other engine's 2", "new"]


def test_a_positive_priority_lets_other_owners_pass():
    queue = queue_of(make_sequence("later", "a", priority=1), make_sequence("now", "b"))
    queue.charge(make_sequence("", "b"), 10**6)
    assert order(queue) == ["now", "later"]


def test_no_priority_passes_the_requests_of_an_owner_with_fewer_tokens():
    queue = queue_of(*(make_sequence(f"first {i}", "a", priority=-100) for i in range(3)), make_sequence("b", "b"))
    assert order(queue) == ["first 0", "b", "first 1", "first 2"]


def test_the_owner_with_fewer_tokens_is_next():
    queue = queue_of(*(make_sequence(f"{owner}{i}", owner) for i in range(3) for owner in "ab"))
    assert start(queue, 25) == "a0"
    assert [start(queue) for _ in range(5)] == ["b0", "b1", "b2", "a1", "a2"]


def test_an_owner_that_comes_back_starts_beside_the_one_with_the_fewest_tokens():
    queue = queue_of(*(make_sequence(f"{owner}{i}", owner) for owner in "ab" for i in range(3)))
    queue.charge(make_sequence("", "a"), 100)
    queue.add(make_sequence("c", "c"))
    assert [start(queue) for _ in range(2)] == ["b0", "c"]


# Who may join a full queue.


def fill(queue, owner, count=10**6):
    """Return how many of so many requests an owner can add."""
    for number in range(count):
        try:
            queue.add(make_sequence(f"{owner}{number}", owner))
        except QueueFullError:
            return number
    return count


def test_an_owner_finds_its_share_of_a_full_queue_and_no_more():
    queue = queue_of(limit=12)
    assert [fill(queue, owner) for owner in "abca"] == [12, 6, 4, 0]
    assert sum(fill(queue, str(owner)) for owner in range(100)) == 24 - 22, "twice the limit is never exceeded"
    with pytest.raises(QueueFullError, match="requests are waiting, the limit is 12"):
        queue.add(make_sequence("a", "a"))


def test_begun_requests_take_places_but_are_never_refused():
    queue = queue_of(*(begun(str(i), owner="a") for i in range(30)), limit=12)
    assert len(queue) == 30
    assert [fill(queue, "a"), fill(queue, "b")] == [0, 0]


# With the scheduler.


def run_round(scheduler):
    """Run a round in which every row at its tip commits 3 tokens; return the tokens of each owner."""
    rows = scheduler.next_batch(Plan(0))
    verdicts = [
        Verdict([7, 7, 7]) if row.start + row.length == len(row.request.token_ids) else Verdict() for row in rows
    ]
    owners = Counter()
    for sequence, output in scheduler.commit(rows, verdicts):
        owners[sequence.owner] += len(output.token_ids)
        if output.finish_reason:
            owners[sequence.owner] += sequence.request.prompt_length
    return owners


def test_owners_of_unequal_demand_get_equal_shares_of_tokens():
    """One sends 10 times as many requests as the others, another has long prompts, the third long outputs."""
    rng = random.Random(0)
    config = EngineConfig(max_num_seqs=8, block_size=4, max_queued_requests=1000, enable_prefix_caching=False)
    scheduler = Scheduler(config, 2000, 1000)
    demands = {"many": (400, 8, 12), "prompts": (60, 60, 12), "outputs": (60, 8, 90)}
    for owner, (count, length, max_tokens) in demands.items():
        for number in range(count):
            lengths = {"length": rng.randint(1, 2 * length), "max_tokens": rng.randint(1, 2 * max_tokens)}
            scheduler.add(make_sequence(f"{owner} {number}", owner, **lengths))
    served = Counter()
    while all(any(waiting.owner == owner for waiting in scheduler.waiting) for owner in demands):
        served += run_round(scheduler)
    mean = served.total() / 3
    assert mean > 2000
    assert all(abs(tokens - mean) <= 0.1 * mean for tokens in served.values()), served


def test_recomputed_and_cached_tokens_are_not_charged():
    scheduler = Scheduler(EngineConfig(max_num_seqs=1, block_size=4), 100, 1000)
    scheduler.add(make_sequence("1", "a", length=41, max_tokens=6))
    run_round(scheduler)
    scheduler.reset()
    run_round(scheduler)
    assert scheduler.waiting._served == {"a": 41 + 6}
    scheduler.add(make_sequence("2", "a", length=41, max_tokens=3))
    run_round(scheduler)
    assert scheduler.waiting._served == {"a": 41 + 6 + 1 + 3}


def test_the_youngest_with_the_highest_priority_is_preempted():
    scheduler = Scheduler(EngineConfig(max_num_seqs=4, block_size=4, max_num_batched_tokens=64), 1 + 4, 1000)
    for name, priority in (("oldest", 0), ("low 1", 1), ("low 2", 1), ("youngest", 0)):
        scheduler.add(make_sequence(name, priority=priority, length=2))
    run_round(scheduler)
    run_round(scheduler)
    assert [sequence.request.request_id for sequence in scheduler.running] == ["oldest", "youngest"]
    assert [sequence.request.request_id for sequence in scheduler.waiting] == ["low 1", "low 2"]


# Who runs.


def seats(scheduler):
    return Counter(sequence.owner for sequence in scheduler.running)


def computed(scheduler, token=7):
    """Run a round in which every request that decodes gets a token; return the ids of the requests with a row."""
    rows = scheduler.next_batch(Plan(0))
    verdicts = [Verdict([token] if row.verify(NO_DRAFT).reaches_tip else []) for row in rows]
    scheduler.commit(rows, verdicts)
    return [row.request.request_id for row in rows]


def scheduler_of(*sequences, num_blocks=10_000, **settings):
    defaults = {"max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    scheduler = Scheduler(EngineConfig(**defaults | settings), num_blocks, 1000)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def test_the_first_prompt_of_an_owner_does_not_wait_for_a_second_one_of_another():
    scheduler = scheduler_of(
        *(make_sequence(f"many {i}", "many", length=60) for i in range(4)), max_num_batched_tokens=16
    )
    for _ in range(5):
        computed(scheduler)
    assert not scheduler.running[-1].is_decoding
    scheduler.add(make_sequence("one", "one", length=60))
    assert "one" in computed(scheduler)


@pytest.mark.parametrize("priority", [-5, 0, 1])
def test_only_a_request_that_lets_others_pass_makes_room_for_an_equal_share(priority):
    """A negative priority makes no place; a positive one gives its own up, and takes nobody's."""
    kept = scheduler_of(*(make_sequence(str(i), str(i)) for i in range(8)))
    computed(kept)
    kept.add(make_sequence("new", "new", priority=priority))
    computed(kept)
    assert "new" not in seats(kept)
    given = scheduler_of(*(make_sequence(str(i), str(i), priority=1) for i in range(8)))
    computed(given)
    given.add(make_sequence("new", "new", priority=priority))
    computed(given)
    assert ("new" in seats(given)) == (priority <= 0)
    assert given.waiting.first.owner == ("7" if priority <= 0 else "new")


def test_a_negative_priority_preempts_the_same_owners_requests_only():
    scheduler = scheduler_of(make_sequence("a", "a", length=15), num_blocks=1 + 13)
    computed(scheduler)
    for i in range(2):
        scheduler.add(make_sequence(f"urgent {i}", "b", priority=-9, length=15))
        computed(scheduler)
    while not scheduler.stats.num_preemptions:
        computed(scheduler)
    assert [s.request.request_id for s in scheduler.waiting] == ["urgent 1"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_owner_runs_soon_and_every_request_ends(seed):
    """Whatever comes: owners have places before any has a second one; nobody starves, and no block is lost."""
    rng = random.Random(seed)
    places = rng.randint(2, 6)
    scheduler = scheduler_of(
        num_blocks=1 + rng.randint(20, 60), max_num_seqs=places, max_num_batched_tokens=rng.choice([8, 64])
    )
    sequences = []
    for i in range(rng.randint(5, 40)):
        owner = rng.choice("aaaaabbcde")
        priority = rng.choice([0, 0, 0, -3, 2])
        sequences.append(
            make_sequence(str(i), owner, priority=priority, length=rng.randint(1, 40), max_tokens=rng.randint(1, 30))
        )
    waiting, rounds, flights, absent_before = list(sequences), 0, [], set()
    scheduler.num_cohorts = rng.choice([1, 2])
    while waiting or scheduler.running or scheduler.waiting:
        while waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop())
        rows = scheduler.next_batch(Plan(0))
        in_flight = {id(row.request) for flight in flights for row in flight}
        assert not in_flight & {id(s.request) for s in scheduler.waiting}, "a pass still writes to its blocks"
        if scheduler.num_cohorts == 1:  # else those in flight keep their places a round longer
            firm = Counter(s.owner for s in scheduler.running if s.priority <= 0)
            absent = {s.owner for s in scheduler.waiting if s.priority <= 0} - seats(scheduler).keys()
            is_unequal = max(firm.values(), default=0) > 1
            assert not (is_unequal and absent & absent_before), (absent, firm)
            absent_before = absent  # a lack of blocks in this round may have sent it back
        flights.append(rows)
        if len(flights) == scheduler.num_cohorts:
            done = flights.pop(0)
            scheduler.commit(done, [Verdict([7] if row.verify(NO_DRAFT).reaches_tip else []) for row in done])
        rounds += 1
        assert rounds < 5000
    assert all(s.finish_reason == "length" for s in sequences)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_texts_depend_on_neither_priority_nor_owner():
    requests = [
        ([i % VOCAB, (i + 1) % VOCAB] * (2 + i % 6), SamplingParams(temperature=0.7, seed=i, max_tokens=12))
        for i in range(14)
    ]
    plain = run(make_engine(MODEL), requests)
    engine = make_engine(MODEL, max_num_seqs=3, num_blocks=30, block_size=4)
    for i, (prompt, params) in enumerate(requests[:8]):
        engine.add(str(i), prompt, params, owner="many", priority=i % 3 - 1)
    arriving = list(enumerate(requests))[8:]

    def arrive(engine, rounds):
        if rounds % 2 == 1 and arriving:
            i, (prompt, params) = arriving.pop(0)
            engine.add(str(i), prompt, params, owner=f"one {i}")

    assert run(engine, [], between=arrive) == plain
    assert engine.stats.num_preemptions > 1
