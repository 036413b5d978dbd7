"""The rates of a chain's places, learned from verdicts."""

import random

import pytest

from engine.control.acceptance import ChainAcceptance


def test_a_chain_is_learned_by_position_among_the_drafts_that_reached_it():
    chance, chains = random.Random(1), ChainAcceptance(3)
    for _ in range(3000):
        accepted = next((i for i, rate in enumerate((0.9, 0.5, 0.1)) if chance.random() > rate), 3)
        chains.observe(3, range(accepted))
    assert chains.gains() == pytest.approx([0.9, 0.45, 0.045], abs=0.08)


def test_the_number_of_accepted_tokens_is_learned():
    chains = ChainAcceptance(3)
    for _ in range(2000):
        chains.observe(3, [0])
        chains.observe(3, [0, 1, 2])
        chains.observe(2, [0, 1])  # cut short: the third token is as likely as in other drafts
    assert chains.length_probabilities(3) == pytest.approx([0, 1 / 3, 0, 2 / 3], abs=0.01)
    assert chains.length_probabilities(1) == pytest.approx([0, 1], abs=0.01)
