"""How rows become the tensors of one pass; what attention makes of them, test_attention tries."""

import pytest
import torch

from engine.execution.batch import MAX_GROUPED_LENGTH, ForwardRow, build, next_tokens
from engine.execution.kv_tensors import KVTensors
from engine.models.layers.layer_attention import KVShape

LONG = MAX_GROUPED_LENGTH + 1


@pytest.fixture
def kv():
    return KVTensors(KVShape(1, 1, 2, 2), num_blocks=20, block_size=4, like=torch.empty(0))


def slots(batch):
    return batch.paged.slots.tolist()


def test_short_rows_are_padded_to_one_group(kv):
    batch = build([ForwardRow([7], 5, [3, 9], 1), ForwardRow([1, 2, 3], 0, [2], 2)], kv)
    (group,) = batch.paged.groups
    assert (group.start, group.rows, group.length, group.extra) == (0, 2, 3, None)
    assert group.places.tolist() == [[5, -1, -1], [0, 1, 2]]
    assert group.limits.tolist() == [[6, 1, 1], [1, 2, 3]]  # padding sees place 0, so that its softmax is finite
    assert group.blocks.tolist() == [[3, 9], [2, 0]]
    assert slots(batch) == [37, 0, 0, 8, 9, 10]


@pytest.mark.parametrize(
    ("lengths", "length"),
    [([1, 16], 16), ([17], 17), ([17] * 8, 17), ([5, 5, 65], 13), ([1] * 7 + [17], 1), ([9] * 7 + [41], 11)],
)
def test_rows_are_cut_where_padding_would_take_as_long_as_another_pass(kv, lengths, length):
    rows = [ForwardRow([1] * count, 0, [1], count) for count in lengths]
    (group,) = build(rows, kv).paged.groups
    assert group.length == length
    assert group.rows * length <= 1.25 * sum(lengths) or max(lengths) <= MAX_GROUPED_LENGTH


def test_a_long_row_is_a_group_of_its_own_and_logits_stay_in_the_order_of_the_rows(kv):
    rows = [ForwardRow(list(range(LONG)), 0, [1, 2, 3, 4, 5], 1), ForwardRow([7, 8], 0, [6], 1)]
    batch = build(rows, kv)
    assert [(group.start, group.rows, group.length) for group in batch.paged.groups] == [(0, 1, 2), (2, 1, LONG)]
    assert batch.token_ids.tolist() == [7, 8, *range(LONG)]
    assert batch.logit_indices.tolist() == [2 + LONG - 1, 1]


def test_a_prompt_is_no_draft_even_if_all_its_tokens_need_logits(kv):
    for num_logits in (0, 1, 60):
        rows = [ForwardRow([1], 0, [1], 1), ForwardRow([1] * 100, 0, [2], num_logits)]
        assert [group.length for group in build(rows, kv).paged.groups] == [1, 100]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ForwardRow([1, 2, 3], 0, [1], 1), True),
        (ForwardRow([1, 2, 3], 1, [1], 1), False),
        (ForwardRow([1], 0, [1], 1), False),
        (ForwardRow([1, 2, 3], 0, [1], 1, parents=[-1, 0]), False),
    ],
    ids=["prompt", "chunk behind another", "one token", "tree"],
)
def test_a_prompts_first_chunk_is_known_as_such(kv, row, expected):
    assert build([row], kv).paged.groups[0].is_prompt_start is expected
    assert not build([row, row], kv).paged.groups[0].is_prompt_start


def test_prepared_steps_are_what_building_each_pass_would_give(kv):
    tables, lengths = [[1, 2], [3, 4, 5]], [3, 8]
    prepared = next_tokens(tables, lengths, 4, kv, max_length=100)
    for step in range(4):
        batch = prepared(step, torch.tensor([7, 8]))
        rows = [ForwardRow([7 + i], length + step, tables[i], 1) for i, length in enumerate(lengths)]
        built = build(rows, kv)
        assert batch.token_ids.tolist() == built.token_ids.tolist()
        assert batch.positions.tolist() == built.positions.tolist()
        assert batch.logit_indices.tolist() == built.logit_indices.tolist()
        assert batch.paged.groups[0].limits.tolist() == built.paged.groups[0].limits.tolist()
        assert slots(batch) == slots(built)


def test_a_row_whose_table_ends_writes_its_surplus_to_block_0(kv):
    prepared = next_tokens([[1], [3, 4]], [3, 3], 2, kv, max_length=100)
    assert slots(prepared(0, torch.tensor([7, 8]))) == [7, 15]
    assert slots(prepared(1, torch.tensor([7, 8]))) == [0, 16]


def test_no_position_lies_beyond_the_models_context(kv):
    prepared = next_tokens([[1, 2]], [3], 3, kv, max_length=5)
    groups = [prepared(step, torch.tensor([7])).paged.groups[0] for step in range(3)]
    assert [int(group.positions) for group in groups] == [3, 4, 4]
    assert [int(group.places) for group in groups] == [3, 4, 5]
