"""What teaches, what is held out, and how much is kept."""

import pytest
import torch

from engine.drafting.learning import lessons as module
from engine.drafting.learning.lessons import REPLAYED_TOKENS, STEP_TOKENS, Lessons, first_read, lessons_of
from tests.engine.drafting.learning.texts import ended


@pytest.mark.parametrize(
    "params",
    [
        {"learning_group": None},
        {"audits": True},
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
        {"grammar": "g", "ignore_eos": False},
        {"num_tokens": 7},
    ],
)
def test_a_text_that_must_not_teach_or_is_no_sample_of_its_law_gives_no_lessons(params):
    assert list(lessons_of(ended(**params))) == []
    assert len(list(lessons_of(ended()))) == 1


def test_one_text_in_eight_is_held_out_and_never_taught():
    store = Lessons()
    for seed in range(400):
        store.add(ended(seed=seed, num_tokens=20))
    held_out = {lesson.seed for lesson in store.held_out}
    assert 30 <= len(held_out) <= 70
    for seed in range(1, 400):  # a text that comes again is on the same side
        store.add(ended(seed=seed, num_tokens=20))
    assert {lesson.seed for lesson in store.held_out} == held_out
    taught = set()
    while lessons := store.take():
        assert sum(lesson.size for lesson in lessons) >= STEP_TOKENS
        taught |= {lesson.seed for lesson in lessons}
    assert not taught & held_out
    assert len(store.held_out) == 2 * len(held_out) - 1


def test_what_is_kept_is_bounded_and_the_largest_group_loses_its_oldest_text(monkeypatch):
    monkeypatch.setattr(module, "ROOM", 1600)
    store = Lessons()
    for seed in range(5):
        store.add(ended(seed=seed, learning_group="small"))
    for seed in range(100):
        store.add(ended(seed=seed, learning_group="large"))
    small = [lesson for pile in (store.waiting, store.held_out) for lesson in pile if lesson.group == "small"]
    assert len(small) == 5
    assert sum(lesson.size for lesson in store.waiting) == 1600
    assert max(lesson.seed for lesson in store.waiting) >= 97
    assert sum(lesson.size for lesson in store.held_out) <= 200


def test_the_first_text_of_a_group_is_held_out_so_that_a_rare_one_is_judged():
    store = Lessons()
    for group in "abc":
        for seed in range(3):
            store.add(ended(seed=seed, learning_group=group))
    assert [lesson.group for lesson in store.held_out if lesson.seed == 0] == ["a", "b", "c"]


def test_groups_take_turns():
    store = Lessons()
    for group, count in (("a", 30), ("b", 8)):
        for seed in range(count):
            store.add(ended(seed=seed, learning_group=group))
    groups = [lesson.group for lesson in store.take()]
    assert groups.count("b") >= 6


def test_a_step_repeats_lessons_of_all_that_was_taught(monkeypatch):
    monkeypatch.setattr(module, "MOST_REPLAYED", 40)
    store, taught = Lessons(), set()
    for seed in range(2000):
        store.add(ended(seed=seed))
        if lessons := store.take():
            again = [lesson for lesson in lessons if lesson.seed in taught]
            assert sum(lesson.size for lesson in lessons if lesson not in again) == STEP_TOKENS
            assert sum(lesson.size for lesson in again) == (REPLAYED_TOKENS if taught else 0)
            assert len({lesson.seed for lesson in lessons}) == len(lessons)
            taught |= {lesson.seed for lesson in lessons}
    assert len(store._taught) == 40
    seeds = sorted(lesson.seed for lesson in store._taught)
    assert seeds[0] < 200
    assert 750 < sum(seeds) / 40 < 1250  # old and new ones alike
    assert seeds[-1] > 1800


def features(request, size=2):
    """The feature of a token is its place in the text."""
    first, length = first_read(request), len(request.token_ids) - 1
    return torch.arange(first, length, dtype=torch.float32).unsqueeze(-1).repeat(1, size)


def test_each_lesson_has_the_features_of_its_own_tokens_before_the_last():
    request = ended(num_tokens=600, prompt=range(2, 302))
    read = features(request)
    assert len(read) == 899 - 44
    for lesson in lessons_of(request, read):
        assert lesson.features[:, 0].tolist() == [*range(lesson.first, lesson.first + len(lesson.token_ids) - 1)]
        assert lesson.features.untyped_storage().nbytes() == lesson.num_bytes  # it keeps no others
    assert [lesson.size for lesson in lessons_of(request, read)] == [256, 256, 88]
    assert [len(lesson.features) for lesson in lessons_of(request, read[:-300])] == [511, 299]
    assert list(lessons_of(request, read[:254])) == []


def test_features_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(module, "FEATURE_BYTES", 10_000)
    store = Lessons()
    for seed in range(300):
        request = ended(seed=seed)
        store.add(request, features(request))
    for pile in (store.waiting, store.held_out):
        assert 9_600 < sum(lesson.num_bytes for lesson in pile) <= 10_000
        assert max(lesson.seed for lesson in pile) > 270
    while store.take():
        assert sum(lesson.num_bytes for lesson in store._taught) <= 10_000
    assert store._taught


def test_one_text_of_each_of_few_groups_is_held_out_whatever_a_client_chooses(monkeypatch):
    store = Lessons()
    for group in range(40):
        for seed in range(8):
            store.add(ended(seed=seed, learning_group=str(group)))
    assert {str(group) for group in range(16)} <= {lesson.group for lesson in store.held_out}
    assert len(store.held_out) < 16 + 2 * 40
    monkeypatch.setattr(module.secrets, "token_bytes", lambda _: b"other")
    others = Lessons()
    for seed in range(100):
        store.add(ended(seed=seed, learning_group="0"))
        others.add(ended(seed=seed, learning_group="0"))
    assert {lesson.seed for lesson in others.held_out} != {lesson.seed for lesson in store.held_out}
