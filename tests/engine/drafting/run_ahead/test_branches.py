"""Branches: which verdict leads where, what each branch attends to, and where its entries belong."""

import pytest
import torch

from engine.drafting.chain import Chain, Drawn
from engine.drafting.run_ahead.branches import Branches, Trunk
from engine.execution.attention import KVShape, KVTensors
from engine.protocols import Request
from engine.sampling.params import SamplingParams

WIDTH = 3
BLOCK_SIZE = 4


def trunk(name, num_committed, drafted, roots):
    request = Request(name, [9] * num_committed, 1, SamplingParams())
    return Trunk(request, Chain(list(drafted)), roots=list(roots))


def branches():
    """Two trunks: five tokens with a draft of two and three verdicts, and two tokens with no draft and one verdict."""
    trunks = [trunk("a", 5, [3, 4], [(2, 7), (0, 8), (1, 6)]), trunk("b", 2, [], [(0, 5)])]
    kv = KVTensors(KVShape(1, 1, 1, 1), 12, BLOCK_SIZE, torch.empty(0))
    return Branches(trunks, WIDTH, [[1, 2, 3, 4], [5, 6, 7]], kv)


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([1, 2, 7], (0, 7)),
        ([1, 2, 3, 7], (1, 7)),
        ([1, 2, 3, 4, 7], (2, 7)),
        ([1, 2, 3, 3], (1, 3)),
        ([1, 2, 4, 7], None),
        ([1, 2], None),
        ([1, 2, 3, 4, 7, 8], None),
    ],
    ids=["none accepted", "one", "all", "again", "another token", "no new token", "more than one round"],
)
def test_committed_tokens_tell_the_verdict(committed, expected):
    one_trunk = Trunk(Request("a", [1, 2], 1, SamplingParams()), Chain([3, 4]))
    assert one_trunk.verdict(committed) == expected


def test_every_branch_begins_with_the_token_of_its_verdict():
    """A trunk with fewer verdicts repeats its last one."""
    assert branches().roots.tolist() == [7, 8, 6, 5, 5, 5]


def test_a_branch_attends_to_its_trunk_up_to_the_verdict_and_to_its_own_tokens():
    grown = branches()
    for step in range(3):
        [group] = grown.next_pass(grown.roots).paged.groups
        accepted = torch.tensor([[2, 0, 1], [0, 0, 0]])
        committed = torch.tensor([[5], [2]])
        assert torch.equal(group.limits, committed + accepted)
        assert torch.equal(group.positions, committed + accepted + step)
        assert group.extra is not None
        for row, scratch in enumerate((7, 2)):
            for branch in range(WIDTH):
                branch_places = [scratch + branch + s * WIDTH for s in range(step + 1)]
                assert group.extra[row, branch].tolist() == branch_places
                assert group.places[row, branch] == branch_places[-1]
        grown.add(Drawn(grown.roots))
    assert grown.num_computed == 3


def test_no_two_branches_of_a_trunk_share_a_place():
    grown = branches()
    for _ in range(3):
        grown.add(Drawn(grown.roots))
    one_trunk = grown.trunks[0]
    places = [place for branch in range(WIDTH) for place in grown.entries(one_trunk, branch)[0]]
    assert sorted(places) == list(range(7, 7 + 3 * WIDTH))


@pytest.mark.parametrize(("branch", "first"), [(0, 7), (1, 5), (2, 6)])
def test_the_entries_of_a_branch_belong_after_the_tokens_that_its_verdict_accepts(branch, first):
    grown = branches()
    grown.add(Drawn(grown.roots))
    grown.add(Drawn(grown.roots))
    scratch, final = grown.entries(grown.trunks[0], branch)
    assert scratch == [7 + branch, 7 + branch + WIDTH]
    assert final == [first, first + 1]


def test_what_is_drawn_is_drawn_for_the_position_after_the_branchs_tokens():
    grown = branches()
    params, positions = grown.draws()
    assert len(params) == 2 * WIDTH
    assert positions == [8, 6, 7, 3, 3, 3]
    depths = []
    for _ in range(2):
        grown.next_pass(grown.roots)
        depths.append(grown.depths())
        grown.add(Drawn(grown.roots))
    # From the tip: the accepted tokens, the verdict's own, and one more for each step.
    assert depths == [[[3, 1, 2], [1, 1, 1]], [[4, 2, 3], [2, 2, 2]]]


def test_paths_and_chains_are_what_was_drawn_for_each_branch():
    grown = branches()
    assert grown.paths() == [[[3, 4, 7], [8], [3, 6]], [[5], [5], [5]]]
    grown.add(Drawn(torch.tensor([10, 11, 12, 13, 14, 15])))
    grown.add(Drawn(torch.tensor([20, 21, 22, 23, 24, 25])))
    assert grown.paths()[0] == [[3, 4, 7, 10, 20], [8, 11, 21], [3, 6, 12, 22]]
    first, second = grown.trunks
    assert [chain.token_ids for chain in grown.chains([(second, 0), (first, 2)])] == [[13, 23], [12, 22]]
