"""What a head's weights are worth, from features that the draft worker holds."""

from dataclasses import replace

import pytest
import torch

from engine.drafting.learning.head_learner import HeadLearner
from engine.drafting.learning.lessons import Lesson
from tests.engine.drafting.learning.texts import changed
from tests.engine.drafting.model.test_feature_cache import VARIANTS, K, Pair

SEED = 5  # of the pair's requests


def drafted(pair, count=1, *, temperature=0.7) -> list[Lesson]:
    """Texts whose last tokens the served head drafted, as lessons on these, with the features of its cache."""
    made = []
    for i in range(count):
        text = [2 + (7 * i + j * j) % 62 for j in range(14)]
        request = pair.request(str(i), text, temperature=temperature)
        pair.compute(request)
        pair.send(request)
        ids = [*text, *pair.apart(request)[0]]
        made.append(Lesson("", ids, len(text), 0, temperature, SEED, pair.drafter.cache.features_of(str(i), 0)))
        pair.drafter.release(str(i))
        pair.blocks.clear()
    return made


def accepted(learner, lessons, weights=None, **others) -> int:
    """Accepted tokens by these weights, if lessons had other features or positions."""
    weights = learner.loaded if weights is None else weights
    lessons = [replace(lesson, **{name: make(lesson) for name, make in others.items()}) for lesson in lessons]
    return sum(learner.score(lesson, weights).accepted for lesson in lessons)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_served_head_drafts_is_accepted_whole_by_the_features_of_its_own_tokens(
    target_path, name, temperature
):
    """Kills: features, labels or noise of a neighbouring place, or other draft lengths than are served."""
    pair = Pair(target_path, VARIANTS[name])
    learner = HeadLearner(pair.drafter.cache.backend, K)
    own = drafted(pair, 8, temperature=temperature)
    assert accepted(learner, own) == 8 * K
    assert accepted(learner, own, features=lambda lesson: lesson.features.roll(1, 0)) < 8 * K
    assert not temperature or accepted(learner, own, first=lambda _: 1) < 8 * K


@pytest.mark.parametrize("name", ["plain", "peagle", "dflash", "dspark"])
def test_steps_bring_a_head_nearer_to_the_texts_and_leave_the_targets_tables_alone(target_path, name):
    pair = Pair(target_path, VARIANTS[name])
    backend = pair.drafter.cache.backend
    learner, head = HeadLearner(backend, K), backend.model.head
    tables = [head.embed_tokens.weight, head.lm_head.weight]
    before, served = [table.clone() for table in tables], dict(learner.loaded)
    backend.assign(changed(served, 0.3))
    taught = drafted(pair, 8)
    worth = accepted(learner, taught)
    for _ in range(20):
        for lesson in taught:
            learner.learn(lesson, K * len(taught))
        learner.end_step()
    assert accepted(learner, taught, learner.candidate()) > 1.1 * worth
    assert all(torch.equal(*pairs) for pairs in zip(tables, before, strict=True))
    assert not {"embed_tokens.weight", "lm_head.weight"} & learner.candidate().keys()
    assert all(table.grad is None for table in tables)


def gradients(learner, lesson) -> float:
    learner._optimizer.zero_grad()
    learner.learn(lesson, 1)
    return sum(weight.grad.abs().sum().item() for weight in learner._learned.values() if weight.grad is not None)


def test_places_after_a_rejected_token_or_the_text_and_a_token_that_the_head_lacks_teach_nothing(target_path):
    pair = Pair(target_path, VARIANTS["dspark, gated"])  # of the first 20 even tokens
    learner = HeadLearner(pair.drafter.cache.backend, K)
    (lesson,) = drafted(pair)
    assert gradients(learner, lesson) == 0
    ids, first = lesson.token_ids, lesson.start
    short = replace(lesson, token_ids=ids[: first + 1])
    assert (gradients(learner, short), learner.score(short, learner.loaded)) == (0, (1, 1))
    lacking = replace(lesson, token_ids=[*ids[:first], 63, *ids[first + 1 :]])
    assert gradients(learner, lacking) == 0
    assert learner.score(lacking, learner.loaded) == (0, 1)
    wrong = [*ids[:first], (ids[first] + 2) % 40, *ids[first + 1 :]]
    rejected = gradients(learner, replace(lesson, token_ids=wrong))
    assert rejected > 0
    wrong[first + 2] = (wrong[first + 2] + 2) % 40
    assert gradients(learner, replace(lesson, token_ids=wrong)) == pytest.approx(rejected)
