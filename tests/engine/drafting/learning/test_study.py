"""When weights take over, when they are undone, and how much time learning takes."""

import resource

import pytest
import torch

from engine.drafting.learning import study as module
from engine.drafting.learning.learner import Learner, Score, accepted_tokens
from engine.drafting.learning.lessons import Lesson
from engine.drafting.learning.study import JUDGED_EVERY, Study, judge
from engine.drafting.learning.swap_watch import ROUNDS, SwapWatch
from engine.errors import ModelError
from tests.engine.conftest import save_llama
from tests.engine.drafting.learning.test_swap_watch import rounds
from tests.engine.drafting.learning.texts import changed, drawn, ended, lessons
from tests.engine.tiny import backend_of
from tests.fakes import Clock
from tests.waiting import wait_for


class FakeLearner:
    """Every candidate is worth what the test says; it notes what it was asked."""

    device = torch.device("cpu")

    def __init__(self):
        self.loaded = {"w": torch.zeros(2)}
        self.worth, self.taught, self.judged, self.starts, self.rate = 2, [], [], [], 1.0

    def learn(self, lesson, num_tokens):
        self.taught.append(lesson)

    def end_step(self):
        pass

    def candidate(self):
        return {"w": torch.full((2,), float(self.worth))}

    def score(self, lesson, weights):
        self.judged.append(lesson)
        worth = weights["w"][0].item() or 1
        return Score(lesson.size * worth, lesson.size)

    def restart(self, weights):
        self.starts.append(weights["w"][0].item())

    def change_rate(self, factor):
        self.rate *= factor


@pytest.fixture
def learner():
    return FakeLearner()


def teach(study, count=JUDGED_EVERY * 20, *, first=0, **params):
    """Texts for at least one judgement, of 40 tokens each."""
    for seed in range(first, first + count):
        study.ended(ended(seed=seed, **params))
        if len(study.inbox) == 100:
            study.lessons.add(*study.inbox.popleft())
            for _ in study.work():
                pass
    for _ in study.work():
        pass


def scores(*accepted):
    return [Score(count, 100) for count in accepted]


def judged(groups, loaded, served, candidate):
    lessons = (Lesson(group, [], 0, 0, 0.0, 0) for group in groups)
    return judge(dict(zip(lessons, scores(*loaded), strict=True)), scores(*served), scores(*candidate))


@pytest.mark.parametrize(
    ("groups", "served", "candidate", "outcome"),
    [
        ("aaaa", (100,) * 4, (110,) * 4, "taken"),
        ("aaaa", (100,) * 4, (99,) * 4, "dropped"),
        ("aaaa", (100,) * 4, (150, 60, 100, 80), None),  # worse, but not surely
        ("aaaa", (100,) * 4, (150, 60, 140, 90), None),  # better, but not surely
        ("aaaaaaaabbbb", (100,) * 12, (140,) * 8 + (95,) * 4, None),  # worse for others
        ("aaaaaaaabbbb", (100,) * 12, (140,) * 8 + (99,) * 4, "taken"),
        ("aaaaaaaabcde", (100,) * 12, (140,) * 8 + (90,) * 4, None),  # small groups together
        ("aaaaaaaab", (100,) * 9, (140,) * 8 + (90,), None),
    ],
)
def test_weights_are_taken_if_they_are_surely_better_and_worse_for_nobody(groups, served, candidate, outcome):
    assert judged(groups, served, served, candidate) == outcome


def test_no_group_loses_bit_by_bit():
    loaded, served, candidate = ([accepted] * 8 + [others] * 4 for accepted, others in ((9, 100), (9, 98), (99, 97)))
    assert judged("aaaaaaaabbbb", served, served, candidate) == "taken"
    assert judged("aaaaaaaabbbb", loaded, served, candidate) is None


@pytest.mark.parametrize(
    ("groups", "others", "candidate", "outcome"),
    [("bbbb", 90, 90, "undone"), ("bbbb", 90, 100, "taken"), ("bbb", 90, 90, None), ("bbbb", 99, 99, "taken")],
)
def test_what_spoils_a_group_that_came_after_it_was_judged_is_undone(groups, others, candidate, outcome):
    loaded, served, new = ([9] * 8 + [100] * 4, [50] * 8 + [others] * 4, [99] * 8 + [candidate] * 4)
    length = 8 + len(groups)
    assert judged("a" * 8 + groups, loaded[:length], served[:length], new[:length]) == outcome


def test_better_weights_are_offered_and_become_the_served_ones(learner):
    study = Study(learner)
    teach(study)
    assert study.offer is not None
    assert study.counts["taken"] == 0
    assert study.taken()["w"].tolist() == [2, 2]
    assert study.counts | {"tokens": 0} == {
        "tokens": 0,
        "steps": study.counts["steps"],
        "taken": 1,
        "dropped": 0,
        "undone": 0,
        "accepted_before": 1.0,
        "accepted_after": 2.0,
    }
    assert study.taken() is None
    assert learner.judged
    assert not {lesson.seed for lesson in learner.judged} & {lesson.seed for lesson in learner.taught}


def test_worse_weights_are_dropped_and_learning_goes_on_from_the_served_ones_more_slowly(learner):
    study = Study(learner)
    learner.worth = 0.5
    teach(study)
    assert study.offer is None
    assert study.counts["dropped"] == len(learner.starts) >= 1
    assert learner.starts[0] == 0.0
    assert learner.rate < 0.5


def test_a_bad_swap_is_undone_within_64_rounds(learner):
    study = Study(learner)
    rounds(study.watch, 3)
    teach(study)
    assert study.taken()["w"][0] == 2
    learner.worth = 3
    teach(study, first=1000)
    assert study.offer is None  # nothing new while the last swap is watched
    watched = study.watch.is_bad
    study.watch.is_bad = lambda: False
    rounds(study.watch, 1, ROUNDS)
    study.watch.is_bad = watched
    assert study.taken()["w"].tolist() == [0, 0]
    assert study.counts["undone"] == 1
    teach(study, 40, first=2000)
    assert learner.starts[-1] == 0.0
    assert study.taken() is None


def test_an_undone_swap_brings_back_the_weights_before_it_not_the_loaded_ones(learner):
    study = Study(learner)
    for value in (2.0, 3.0):
        study.offer = {"w": torch.full((2,), value)}
        study.taken()
    study.watch.is_bad = lambda: True
    assert study.taken()["w"].tolist() == [2, 2]


def test_weights_that_were_just_undone_are_not_offered_again(learner):
    study = Study(learner)
    teach(study)
    study.offer, study._was_undone = None, True
    assert list(study._judge()) == []
    study._was_undone = False
    assert len(list(study._judge())) > 8
    assert study.offer is not None


def test_learning_takes_its_share_of_the_time_in_which_nothing_is_drafted(learner):
    clock, drafted = Clock(), [10.0]
    study = Study(learner, share=0.25, drafted_s=lambda: drafted[0], clock=clock)
    since = clock(), 10.0
    clock.now += 1.0
    assert study.pause_s(1.0, since) == pytest.approx(3.0)
    clock.now += 2.0
    drafted[0] += 1.5
    assert study.pause_s(1.0, since) == pytest.approx(2.5)
    clock.now += 2.5
    assert study.pause_s(1.0, since) == pytest.approx(0.0)


async def test_what_was_learned_is_kept_at_a_path_for_the_same_draft(learner, tmp_path):
    path = tmp_path / "learned.safetensors"
    study = Study(learner, share=1.0, path=path, draft="A")
    teach(study)
    study.taken()
    study.start()
    await wait_for(path.exists)
    study.close()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    other = FakeLearner()
    assert Study(other, path=path, draft="A").taken()["w"].tolist() == [2, 2]
    assert other.starts == [2.0]
    with pytest.raises(ModelError, match=r"learned.safetensors, which holds what another draft learned; remove it"):
        Study(learner, path=path, draft="B")
    path.write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be read"):
        Study(learner, path=path, draft="A")


async def test_a_full_disk_ends_nothing_and_the_next_swap_is_kept(learner, tmp_path, caplog):
    path, limits = tmp_path / "learned", resource.getrlimit(resource.RLIMIT_FSIZE)
    study = Study(learner, share=1.0, path=path)
    teach(study)
    study.taken()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        study.start()
        await wait_for(lambda: f"not kept at {path}" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    study.offer = learner.candidate()
    study.taken()
    await wait_for(path.exists)
    study.close()


async def test_an_error_ends_learning_alone(learner, caplog):
    study = Study(learner)
    learner.learn = lambda *_: 1 / 0
    for seed in range(40):
        study.ended(ended(seed=seed))
    study.start()
    await wait_for(lambda: "Learning has ended" in caplog.text)


def test_features_that_wait_take_bounded_memory_and_those_of_silent_texts_are_not_read(learner, monkeypatch):
    monkeypatch.setattr(module, "FEATURE_BYTES", 1000)
    study, read = Study(learner), []

    def features_of(request_id, first):
        read.append((request_id, first))
        return torch.zeros(100)

    study.ended(ended("silent", learning_group=None), features_of)
    for number in range(5):
        study.ended(ended(str(number), prompt=range(2, 302)), features_of)
    assert read == [("0", 44), ("1", 44), ("2", 44)]
    assert len(study.inbox) == 3


@pytest.mark.parametrize(("before", "few"), [(50, 60), (50, 1), (200, 60)])
def test_many_texts_of_one_key_cost_another_key_nothing(before, few, tmp_path, monkeypatch):
    """The draft fits the few texts of one key; another model wrote the many of the other, some before all of those."""
    backend = backend_of(save_llama(tmp_path, seed=2, layers=1))
    learner = Learner(backend, 4)
    fresh, its = lessons(drawn(backend, 90)[60:]), drawn(backend, few, learning_group="few")
    backend.assign(changed(learner.loaded, 0.4))
    many = drawn(backend, 240, learning_group="many")
    monkeypatch.setattr(SwapWatch, "is_watching", False)
    monkeypatch.setattr(module, "JUDGED_EVERY", 4)
    study = Study(learner)
    for text in [*many[:before], *its, *many[before:]]:
        study.ended(text)
        for _ in study.work():
            study.taken()

    def tokens_a_pass(weights) -> float:
        return 1 + accepted_tokens([learner.score(lesson, weights) for lesson in fresh])

    assert tokens_a_pass(study._served) >= 0.97 * tokens_a_pass(learner.loaded)
