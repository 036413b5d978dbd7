"""What is learned about drafts of every length from verdicts on the longest."""

import random

import pytest

from engine.control.acceptance import ChainAcceptance, TreeAcceptance


def test_a_chain_is_learned_by_position_among_the_drafts_that_reached_it():
    chance, chains = random.Random(1), ChainAcceptance(3)
    for _ in range(3000):
        accepted = next((i for i, rate in enumerate((0.9, 0.5, 0.1)) if chance.random() > rate), 3)
        chains.observe(3, range(accepted))
    assert chains.gains() == pytest.approx([0.9, 0.45, 0.045], abs=0.08)


def test_a_tree_tells_what_each_smaller_tree_would_have_had_accepted():
    """The path of a verdict is 0, 1, 3 or only 2; the nodes come the best first."""
    trees = TreeAcceptance(5)
    for nth in range(4000):
        trees.observe(4, [2] if nth % 4 == 0 else [0, 1, 3] if nth % 4 == 1 else [0, 1])
    first, second, third, fourth, never = trees.gains()
    assert (first, second) == pytest.approx((0.75, 0.75), abs=0.05)
    assert (third, fourth) == pytest.approx((0.25, 0.25), abs=0.05)
    assert never <= fourth, "a node that was never requested is not likelier than those before it"


def test_of_several_chains_a_node_may_be_likelier_than_the_one_before_it_but_not_than_its_parent():
    """Three chains: the first goes on with 0, 3, 6; the last, which is rarely taken, with 2, 5."""
    trees = TreeAcceptance(7, num_chains=3)
    prior = trees.gains()
    assert prior[0] > prior[3] > prior[6] > prior[1] > prior[2]
    for nth in range(4000):
        trees.observe(6, [2, 5] if nth % 4 == 0 else [0, 3])
    gains = trees.gains()
    assert gains[:6] == pytest.approx([0.75, 0, 0.25, 0.75, 0, 0.25], abs=0.05)
    assert sum(gains[:3]) == pytest.approx(1.0, abs=0.05)
    assert gains[6] <= gains[3], "a node that was never requested is not likelier than its parent"


@pytest.mark.parametrize("acceptance", [ChainAcceptance, TreeAcceptance])
def test_what_was_not_delivered_counts_as_rejected(acceptance):
    learned = acceptance(4)
    for _ in range(2000):
        learned.observe(4, [])
    assert sum(learned.gains()) < 0.02


def test_the_number_of_accepted_tokens_is_learned():
    chains = ChainAcceptance(3)
    for _ in range(2000):
        chains.observe(3, [0])
        chains.observe(3, [0, 1, 2])
        chains.observe(2, [0, 1])  # cut short: the third token is as likely as in other drafts
    assert chains.length_probabilities(3) == pytest.approx([0, 1 / 3, 0, 2 / 3], abs=0.01)
    assert chains.length_probabilities(1) == pytest.approx([0, 1], abs=0.01)
