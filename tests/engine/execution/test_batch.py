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
    rows = [ForwardRow([7], 5, [3, 9], 1), ForwardRow([1, 2, 3], 0, [2], 2)]
    batch = build(rows, kv)
    (group,) = batch.paged.groups
    assert (group.start, group.rows, group.length) == (0, 2, 3)
    assert batch.token_ids.tolist() == [7, 0, 0, 1, 2, 3]
    assert group.places.tolist() == [[5, -1, -1], [0, 1, 2]]
    assert group.limits.tolist() == [[6, 1, 1], [1, 2, 3]]  # padding sees place 0, so that its softmax is finite
    assert group.blocks.tolist() == [[3, 9], [2, 0]]
    assert group.extra is None
    assert batch.positions.tolist() == [5, 0, 0, 0, 1, 2]
    assert slots(batch) == [37, 0, 0, 8, 9, 10]
    assert batch.logit_indices.tolist() == [0, 4, 5]


def test_a_long_row_is_a_group_of_its_own_and_logits_stay_in_the_order_of_the_rows(kv):
    rows = [
        ForwardRow(list(range(LONG)), 0, [1, 2, 3, 4, 5], 1),
        ForwardRow([7, 8], 0, [6], 1),
        ForwardRow(list(range(LONG)), 0, [7, 8, 9, 10, 11], 0),
    ]
    batch = build(rows, kv)
    assert [(group.start, group.rows, group.length) for group in batch.paged.groups] == [
        (0, 1, 2),
        (2, 1, LONG),
        (2 + LONG, 1, LONG),
    ]
    assert batch.token_ids.tolist() == [7, 8, *range(LONG), *range(LONG)]
    assert batch.logit_indices.tolist() == [2 + LONG - 1, 1]


@pytest.mark.parametrize(("length", "num_groups"), [(MAX_GROUPED_LENGTH, 1), (LONG, 2)])
def test_rows_share_a_group_up_to_a_length(kv, length, num_groups):
    batch = build([ForwardRow([1], 0, [1], 1), ForwardRow([1] * length, 0, [2, 3, 4, 5, 6], 1)], kv)
    assert len(batch.paged.groups) == num_groups


def test_a_long_draft_goes_on_in_further_rows_that_have_its_blocks(kv):
    chain = ForwardRow(list(range(40)), 3, list(range(1, 12)), 40)
    tree = ForwardRow(list(range(50, 70)), 2, [13, 14, 15, 16, 17, 18], 18, parents=list(range(-1, 16)))
    (group,) = (batch := build([chain, tree], kv)).paged.groups
    assert (group.rows, group.length) == (3, 24)
    assert batch.token_ids.tolist() == [*range(40), *[0] * 8, *range(50, 70), *[0] * 4]
    assert batch.logit_indices.tolist() == [*range(40), *range(50, 68)]
    assert group.blocks.tolist() == [list(range(1, 12))] * 2 + [[13, 14, 15, 16, 17, 18, *[0] * 5]]
    assert group.places.tolist() == [[*range(3, 27)], [*range(27, 43), *[-1] * 8], [*range(2, 22), *[-1] * 4]]
    assert group.limits.tolist() == [[*range(4, 28)], [*range(28, 44), *[1] * 8], [3, 4, *[5] * 18, *[1] * 4]]
    assert group.positions.tolist() == [[*range(3, 27)], [*range(27, 43), *[0] * 8], [*range(2, 22), *[0] * 4]]
    assert group.extra[2, 2:5, :3].tolist() == [[0, 0, 0], [5, 0, 0], [5, 6, 0]]
    assert not group.extra[:2].any()


@pytest.mark.parametrize(
    ("lengths", "length"),
    [([1, 16], 16), ([17], 17), ([17] * 8, 17), ([5, 5, 65], 13), ([1] * 7 + [17], 1), ([9] * 7 + [41], 11)],
)
def test_rows_are_cut_where_padding_would_take_as_long_as_another_pass(kv, lengths, length):
    rows = [ForwardRow([1] * count, 0, [1], count) for count in lengths]
    (group,) = build(rows, kv).paged.groups
    assert group.length == length
    assert group.rows * length <= 1.25 * sum(lengths) or max(lengths) <= MAX_GROUPED_LENGTH


def test_a_prompt_is_no_draft_even_if_all_its_tokens_need_logits(kv):
    for num_logits in (0, 1, 60):
        rows = [ForwardRow([1], 0, [1], 1), ForwardRow([1] * 100, 0, [2], num_logits)]
        assert [group.length for group in build(rows, kv).paged.groups] == [1, 100]


def test_a_table_is_read_as_far_as_the_row_reaches(kv):
    batch = build([ForwardRow([7], 3, [3, 9, 11], 1)], kv)
    assert batch.paged.groups[0].blocks.tolist() == [[3]]


def test_the_nodes_of_a_tree_stand_at_their_depth_and_are_stored_in_their_order(kv):
    # The tip is the token at place 4; two children, and a child of the second.
    batch = build([ForwardRow([5, 11, 12, 13], 4, [3, 9], 4, parents=[-1, -1, 1])], kv)
    (group,) = batch.paged.groups
    assert group.positions.tolist() == [[4, 5, 5, 6]]
    assert group.places.tolist() == [[4, 5, 6, 7]]
    assert group.limits.tolist() == [[5, 5, 5, 5]]
    seen = [sorted({place for place in row if place}) for row in group.extra[0].tolist()]
    assert seen == [[], [5], [6], [6, 7]]


def test_a_tree_beside_other_rows_changes_nothing_of_theirs(kv):
    tree = ForwardRow([5, 11, 12], 4, [3, 9], 3, parents=[-1, -1])
    chain = ForwardRow([5, 11, 12], 4, [4, 5], 3)
    (group,) = build([tree, chain], kv).paged.groups
    assert group.positions.tolist() == [[4, 5, 5], [4, 5, 6]]
    assert group.limits.tolist() == [[5, 5, 5], [5, 6, 7]]
    assert group.extra[1].tolist() == [[0], [0], [0]]  # place 0, which every token sees anyway


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
