"""The curve of a draft that wrote the texts itself, and of one that did not."""

from xml.etree import ElementTree

import pytest

from engine.config import BUNDLED_DRAFT, ModelConfig
from engine.execution.registry import make_backend
from engine.models.loader import load_model
from engine.models.registry import open_model
from tests.bench.learning.curve import Follower, Window
from tests.bench.learning.picture import draw
from tests.engine.drafting.learning.texts import changed, drawn

K = 3


@pytest.fixture(scope="module")
def texts():
    source = open_model(ModelConfig(str(BUNDLED_DRAFT), device="cpu", dtype="float32"))
    return drawn(make_backend(load_model(source), source), 12)


def test_rounds_are_decided_by_the_text(texts):
    follower = Follower(BUNDLED_DRAFT, K)
    (window,) = follower.meet("own", texts, seen=100)
    assert window == Window("own", 100 + 12 * 60, K + 1.0, K + 1.0, 0)
    ends = follower._round_ends(texts[0], follower._agreements(texts[0], follower.served))
    assert ends[:3] == [3, 3 + K + 1, 3 + 2 * (K + 1)]
    follower.served = changed(follower.learner.loaded, 0.5)
    assert follower.gain(texts) < 0.7
    ends = follower._round_ends(texts[0], follower._agreements(texts[0], follower.served))
    assert ends[1] - 3 < K + 1


def test_the_watch_sees_what_became_of_each_draft(texts):
    follower = Follower(BUNDLED_DRAFT, K)
    seen = []
    follower.study.watch.drafted = lambda rows, drafts: seen.extend(drafts)
    follower._watch(texts[0], 10, 12)  # one draft token was accepted
    (draft,) = seen
    assert draft.token_ids == [texts[0].token_ids[10], -1, texts[0].token_ids[12]]


def test_the_picture_has_a_mark_for_each_swap(tmp_path):
    windows = [Window("a", 5000, 2.0, 2.0, 0), Window("b", 10_000, 1.5, 1.8, 1)]
    draw(windows, tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert [len(root.findall(f"{{*}}{name}")) for name in ("polyline", "circle")] == [2, 1]
