"""What weights are worth, and that steps make them better."""

import pytest
import torch

from engine.drafting.learning.learner import Learner, accepted_tokens, rejection_loss
from engine.drafting.learning.whole_text import WholeText
from engine.errors import ModelError
from engine.models.layers.layer_attention import AttentionParams
from tests.engine.conftest import save_llama
from tests.engine.drafting.learning.texts import changed, drawn, lessons
from tests.engine.tiny import backend_of

K = 4


@pytest.fixture
def backend(tmp_path):
    return backend_of(save_llama(tmp_path, seed=2, layers=1, hidden=32))


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_a_text_that_the_draft_draws_itself_is_accepted_whole(backend, temperature):
    """Kills: labels or noise of a neighbouring place, another temperature."""
    learner = Learner(backend, K)
    (lesson,) = lessons(drawn(backend, temperature=temperature))
    score = learner.score(lesson, learner.loaded)
    assert score.places == 60
    assert score.accepted == 56 * K + 4 + 3 + 2 + 1


def test_a_long_text_is_cut_into_lessons_at_their_own_positions(backend):
    """Only the first tokens of the second lesson's context are missing; with other noise, few tokens would agree."""
    learner = Learner(backend, 1)
    first, second = lessons(drawn(backend, num_tokens=300))
    assert (first.first, first.start, first.size, second.first, second.start, second.size) == (0, 3, 256, 3, 256, 44)
    assert accepted_tokens([learner.score(second, learner.loaded)]) > 0.9


def test_steps_on_texts_of_another_model_bring_the_draft_nearer_to_it(backend):
    learner = Learner(backend, K)
    backend.assign(changed(learner.loaded, 0.4))
    taught, held_out = lessons(drawn(backend, 40))[:32], lessons(drawn(backend, 40))[32:]
    before = accepted_tokens([learner.score(lesson, learner.loaded) for lesson in held_out])
    for _ in range(3):
        for first in range(0, len(taught), 4):
            for lesson in taught[first : first + 4]:
                learner.learn(lesson, 240)
            learner.end_step()
    after = accepted_tokens([learner.score(lesson, learner.candidate()) for lesson in held_out])
    assert after > 1.1 * before
    learner.restart(learner.loaded)
    assert accepted_tokens([learner.score(lesson, learner.candidate()) for lesson in held_out]) == before


@pytest.mark.parametrize("numbers", [torch.bfloat16, torch.float16])
def test_weights_that_16_bits_hold_stay_such_as_kernels_read_them_so(backend, numbers):
    for weight in backend.model.module.parameters():
        weight.data = weight.data.to(numbers).float()
    learner = Learner(backend, K)
    backend.assign(changed(learner.loaded, 0.4))
    for lesson in lessons(drawn(backend)):
        learner.learn(lesson, 60)
        learner.end_step()
    candidate = learner.candidate()
    assert all(torch.equal(weight.to(numbers).float(), weight) for weight in candidate.values() if weight.ndim == 2)
    assert not all(torch.equal(weight, learner.loaded[name]) for name, weight in candidate.items())


def test_served_weights_are_worth_what_they_were_judged_to_be(backend):
    learner = Learner(backend, K)
    weights = changed(learner.loaded, 0.2)
    backend.assign(weights)
    (lesson,) = lessons(drawn(backend))
    assert learner.score(lesson, weights).accepted == 56 * K + 10
    assert learner.score(lesson, learner.loaded).accepted < 200  # its own weights are copies


def test_the_loss_is_zero_where_the_draft_is_accepted_and_lowers_the_drawn_token_where_it_is_not():
    scores = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]], requires_grad=True)
    loss = rejection_loss(scores, torch.tensor([1, 2]))
    loss.backward()
    assert loss.item() == 2.0
    assert scores.grad.tolist() == [[0, 0, 0], [1, 0, -1]]


def test_a_model_that_cannot_learn_is_refused(backend):
    with pytest.raises(ModelError, match="masks of its own"):
        WholeText().attend(0, *torch.zeros(3, 1, 1, 4), AttentionParams(softcap=1.0))
    layer = backend.model.module.model.layers[0].self_attn
    layer.o_proj = torch.nn.Module()
    layer.o_proj.in_features = 32
    with pytest.raises(ModelError, match="cannot learn: its weights are quantised or packed"):
        Learner(backend, K)
