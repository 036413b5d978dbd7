"""When a length is tried: not while it was lost on, not without hope, and never for good."""

from engine.control.budget import Budget
from engine.control.trials import Trials

LENGTHS = [0, 1, 2, 3, 4]


def play(trials, rounds, seconds_of, *, length=4, gain=0.0, key="load"):
    """Rounds of one second; return what was tried in each."""
    tried = []
    for _ in range(rounds):
        budget = Budget((1 + gain * length) / seconds_of(length), 1 + gain * length, [0] * length)
        trials.num_rounds += 1
        chosen = trials.choose(key, LENGTHS, length, budget, lambda k: (1 + gain * k, seconds_of(k)))
        trials.clock += seconds_of(length if chosen is None else chosen)
        tried.append(chosen)
    return tried


def test_no_draft_and_half_the_length_are_tried_at_once_but_nothing_longer_than_the_longest():
    tried = play(Trials(), 60, lambda k: 1.0 + 0.01 * k, gain=0.2)
    assert set(tried) == {None, 0, 2}


def test_the_trials_of_a_length_lose_a_small_share_of_the_time():
    """A draft of 4 makes twice the tokens in the same time, so each round without one loses half a second."""
    tried = play(Trials(), 20_000, lambda _: 1.0, gain=0.25)
    assert 20 < tried.count(0) < 20_000 * 0.002 / 0.5 + 6


def test_no_length_is_given_up_for_good():
    trials = Trials()
    assert 4 in play(trials, 400, lambda k: 1.0 + 10 * k, length=0, gain=0.5)
    assert 4 in play(trials, 30_000, lambda k: 1.0 + 10 * k, length=0, gain=0.5)


def test_a_hopeless_trial_ends_after_a_round():
    tried = play(Trials(), 30, lambda k: 1.0 if k == 0 else 5.0, length=0, gain=0.5)
    assert tried.count(4) == tried.count(1) == 1


def test_longer_drafts_that_would_not_pay_if_they_were_free_are_not_tried():
    assert set(play(Trials(), 2000, lambda _: 1.0, length=1, gain=0.001)) == {None, 0}


def test_a_trial_does_not_go_on_after_a_pause():
    trials = Trials()
    while play(trials, 1, lambda _: 1.0, gain=0.02) == [None]:
        pass
    trials.num_rounds += 20
    assert play(trials, 8, lambda _: 1.0, gain=0.02) == [None] * 8


def test_a_load_that_flickers_has_few_trials():
    trials = Trials()
    tried = [kind for _ in range(300) for key in "ab" for kind in play(trials, 3, lambda _: 1.0, gain=0.2, key=key)]
    assert len([kind for kind in tried if kind is not None]) < 0.05 * len(tried)
