"""What is held of a request is a prefix of its features, whatever arrives; and who waits for what."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.model import feature_store as feature_store_module
from engine.drafting.model.feature_store import FeatureStore

ROW_BYTES = 3
TRUTH = bytes(range(60))
"""The features of 20 tokens."""


def put(store: FeatureStore, offset: int, stop: int, *, end: int | None = None, request_id: str = "a") -> bool:
    rows = memoryview(TRUTH)[offset * ROW_BYTES : stop * ROW_BYTES]
    return store.put(request_id, offset, stop if end is None else end, rows, dtype="uint8", row_bytes=ROW_BYTES)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(-1, 20))))
def test_whatever_is_lost_repeated_or_late_the_rows_taken_are_a_prefix_of_the_features(events):
    store, taken = FeatureStore(0.0), bytearray()
    for offset, stop, count in events:
        held = offset <= len(taken) // ROW_BYTES or None
        accepted = put(store, offset, max(offset, stop))
        assert accepted or held is None
        start, rows = store.take("a", count)
        assert start == len(taken) // ROW_BYTES == store.num_taken("a") - len(rows) // ROW_BYTES
        taken += rows
        assert taken == TRUTH[: len(taken)]
        assert count < 0 or len(taken) <= max(count, start) * ROW_BYTES
    assert sum(put(store, 0, 20) for _ in range(2)) == 2
    assert taken + store.take("a", 20)[1] == TRUTH


def test_a_draft_waits_for_rows_that_are_on_their_way():
    store = FeatureStore(60.0)
    put(store, 0, 4)
    late = threading.Timer(0.02, lambda: put(store, 4, 6))
    late.start()
    assert store.wait("a", 6)
    assert store.counts["waited"] == 1
    late.join()


def test_a_draft_does_not_wait_for_rows_that_come_in_a_later_round():
    store = FeatureStore(60.0)
    put(store, 0, 4, end=10)
    assert not store.wait("a", 10)
    late = threading.Timer(0.02, lambda: put(store, 0, 2, end=10, request_id="b"))
    late.start()
    assert not store.wait("b", 10)  # it waited, and learned that it need not
    late.join()
    assert store.counts["waited"] == 1


def test_after_a_wait_in_vain_no_draft_waits_until_something_arrives():
    store = FeatureStore(0.001)
    assert not store.wait("a", 1)  # nothing has ever come
    put(store, 0, 4)
    assert not store.wait("a", 5)
    assert not store.wait("a", 5)
    assert not store.wait("never heard of", 1)
    assert store.counts == {"bytes": 12, "waited": 1, "missing": 4}
    put(store, 0, 1, request_id="b")
    store.wait("a", 5)
    assert store.counts["waited"] == 2


def test_forgotten_rows_must_be_sent_from_the_start():
    store = FeatureStore(0.0)
    put(store, 0, 4)
    store.take("a", 4)
    store.forget("a")
    store.forget("never heard of")
    assert store.num_taken("a") == 0
    assert not put(store, 4, 6)
    assert store.take("a", 6) == (0, b"")
    assert put(store, 0, 6)
    assert store.take("a", 6) == (0, TRUTH[:18])


def test_too_many_rows_cost_the_request_that_was_silent_the_longest(monkeypatch):
    monkeypatch.setattr(feature_store_module, "_MAX_BYTES", 30)
    store = FeatureStore(0.0)
    put(store, 0, 4, request_id="b")
    put(store, 0, 4)
    put(store, 4, 5, request_id="b")
    put(store, 4, 8)
    assert store.take("a", 8) == (0, TRUTH[:24])
    assert store.take("b", 8) == (0, TRUTH[:0])
    put(store, 0, 9, request_id="b")  # what was taken or forgotten no longer counts
    assert store.take("b", 9) == (0, TRUTH[:27])
