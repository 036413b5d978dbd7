"""A GPU that drafts and learns, against a schedule computed by hand, with passes of constant time."""

from types import SimpleNamespace

import pytest

from tests.bench.paced.virtual.learning import CostsOfLearning, LearningAccelerator
from tests.engine.drafting.learning.texts import ended

TEXTS = [ended(num_tokens=160)]


def learning_gpu(**options):
    device = SimpleNamespace(pass_seconds=lambda work: 1e-3)
    device.model = SimpleNamespace(head_weights=0, hidden_size=1, layer_weights=0)
    device.num_gpus, device.hardware = 1, SimpleNamespace(bytes_per_s=1)
    return LearningAccelerator(CostsOfLearning(device), TEXTS, **options)


def test_a_draft_pass_stands_still_while_a_learning_pass_runs_whichever_was_first():
    gpu = learning_gpu()  # learns from 0 to 3 ms
    assert gpu.launch(1e-3, 1e-3) == pytest.approx(4e-3), "it waits, and that counts as drafting"
    assert gpu.launch(7.5e-3, 1e-3) == pytest.approx(8.5e-3), "3 of 6 ms without drafts have not passed"
    assert gpu.launch(9.5e-3, 1e-3) == pytest.approx(13.5e-3), "the next learning pass begins at 10 ms"


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_learning_takes_its_share_of_the_time_without_drafts(share):
    gpu = learning_gpu(share=share)
    for number in range(1000):
        gpu.launch(number * 10e-3, 2e-3)
    assert gpu.busy_s == pytest.approx(2.0)
    assert 0.7 < gpu.learning_s / (share * 8.0) <= 1.0, "less, since drafts that wait count as drafting"
    assert gpu.study.counts["taken"] == 0 < gpu.study.counts["steps"]
