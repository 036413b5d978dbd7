"""What an encoder's input adds to the rows of a pass, and which tokens the two attentions of a decoder see."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine.encoder_decoder.inputs import InputPasses
from engine.execution.batch import ForwardRow, build, next_tokens
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import KVShape


@pytest.fixture
def kv():
    kv = KVTensors(KVShape(1, 2, 2, 2), num_blocks=20, block_size=4, like=torch.empty(0))
    kv.extras = InputPasses(SimpleNamespace(device="cpu"), 0, 0)
    return kv


def slots(batch):
    return batch.paged.slots.tolist()


def test_an_encoders_input_is_taken_out_of_its_row_and_the_rest_attends_to_what_follows_it(kv):
    rows = [ForwardRow([7, 8, 9, 0, 5], 0, [3, 9], 2, input_length=3), ForwardRow([6], 7, [4, 2], 1, input_length=2)]
    batch = build(rows, kv)
    (encoder_input,) = batch.added.inputs
    assert (encoder_input.token_ids.tolist(), encoder_input.slots.tolist()) == ([7, 8, 9], [12, 13, 14])
    (group,) = batch.paged.groups
    assert batch.token_ids.tolist() == [0, 5, 6, 0]
    assert group.places.tolist() == [[3, 4], [7, -1]]
    assert group.limits.tolist() == [[4, 5], [8, 3]]  # padding sees its row's first token after the input
    assert group.added.lengths.tolist() == [3, 2]
    assert batch.logit_indices.tolist() == [0, 1, 2]
    assert batch.num_tokens == 3 + 4


def test_a_row_of_an_encoders_input_alone_leaves_nothing_for_the_decoder(kv):
    alone = ForwardRow([7, 8, 9], 0, [3], 0, input_length=3)
    batch = build([alone, ForwardRow([6], 7, [4, 2], 1, input_length=2)], kv)
    assert (batch.token_ids.tolist(), batch.paged.groups[0].rows, batch.num_tokens) == ([6], 1, 4)
    batch = build([alone], kv)
    assert (batch.token_ids.tolist(), batch.paged.groups, batch.logit_indices.tolist()) == ([], [], [])


def test_prepared_passes_know_the_encoders_lengths_and_each_has_a_mask_of_its_own(kv):
    rows = [ForwardRow([6], 2, [1], 1, input_length=2), ForwardRow([6], 2, [3, 4], 1, input_length=1)]
    prepared = next_tokens([[1], [3, 4]], [3, 3], 2, kv, max_length=100, added=build(rows, kv, carries=True).added)
    first, second = (prepared(step, torch.tensor([5, 6])).paged.groups[0] for step in range(2))
    assert first.added.lengths.tolist() == [2, 1]
    bias = torch.arange(9.0).repeat(1, 1)
    sees = [
        (group.added.biased_mask(group, bias, 4) > -math.inf).sum(-1).flatten().tolist() for group in (first, second)
    ]
    assert sees == [[2, 3], [3, 4]]


def test_only_cross_attention_sees_an_encoders_tokens_and_it_sees_nothing_else(kv):
    rows = [ForwardRow([1, 1], 3, [1, 2], 0, input_length=3), ForwardRow([1], 6, [3, 2], 0, input_length=1)]
    (group,) = build(rows, kv).paged.groups
    bias = torch.arange(3.0).repeat(2, 1)
    cross = group.added.cross_mask(group, torch.empty(0), 4)
    assert [[i for i, score in enumerate(row) if score == 0] for row in cross[:, 0, 0].tolist()] == [[0, 1, 2], [0]]
    own = group.added.biased_mask(group, bias, 4)
    seen = [[{i: s for i, s in enumerate(scores) if s > -math.inf} for scores in row] for row in own[:, 0].tolist()]
    assert seen == [[{3: 0}, {3: 1, 4: 0}], [{1: 2, 2: 2, 3: 2, 4: 2, 5: 1, 6: 0}, {1: 0}]]
    assert group.added.biased_mask(group, bias, 4) is own
    known = weakref.ref(own)
    del own
    assert group.added.biased_mask(group, bias.clone(), 4).shape == (2, 2, 2, 2 * 4)
    assert known() is None, "the mask of another layer's bias is not kept"
