"""The nodes of a tree: paths, children and the order of computing."""

import pytest

from engine.drafting.nodes import TIP, Tree
from engine.protocols import Draft


class Levels(Tree):
    """Grows as it is told."""

    def next_level(self):
        return []

    def draft(self):
        return Draft()


@pytest.fixture
def tree():
    tree = Levels({9})
    for parent, token in ((TIP, 5), (TIP, 6), (0, 7), (1, 9), (2, 8)):
        tree._append(parent, token)
    return tree


def test_a_path_leads_from_the_tip_to_a_node(tree):
    assert tree.path(TIP) == []
    assert tree.path(4) == [0, 2, 4]
    assert [node.depth for node in tree.nodes] == [1, 1, 2, 2, 3]


def test_children_are_found_by_token_and_of_equal_ones_the_first(tree):
    assert tree.child(TIP, 6) == 1
    assert tree.child(0, 6) is None
    tree._append(TIP, 6)
    assert tree.child(TIP, 6) == 1


def test_nodes_are_numbered_as_they_are_computed(tree):
    tree._compute([1, 0])
    tree._compute([2])
    assert [tree.order(node) for node in (0, 1, 2)] == [1, 0, 2]
    assert tree.num_computed == 3
    with pytest.raises(AssertionError, match="not computed"):
        tree.order(3)


def test_a_text_ends_with_an_end_id(tree):
    assert [tree._ends(node) for node in range(5)] == [False, False, False, True, False]
