"""When a length is tried: not while it was lost on, and never not again."""

from engine.control.trials import Trials

LENGTHS = [0, 1, 2, 3, 4]


def play(trials, rounds, seconds_of, *, length=4, gain=0.0, key="load"):
    """Rounds that make `1 + gain * length` tokens; return what was tried in each."""
    tried, rate = [], (1 + gain * length) / seconds_of(length)
    for _ in range(rounds):
        others = [k for k in LENGTHS if k != length]
        chosen = trials.choose(key, others, lambda k: (seconds_of(k), seconds_of(k) - (1 + gain * k) / rate))
        trials.clock += seconds_of(length if chosen is None else chosen)
        tried.append(chosen)
    return tried


def test_all_lengths_are_tried_in_their_order_and_soon():
    tried = play(Trials(), 60, lambda k: 1.0 + 0.01 * k, gain=0.2)
    assert list(dict.fromkeys(k for k in tried if k is not None)) == [0, 1, 2, 3]


def test_the_trials_of_a_length_lose_a_small_share_of_the_time():
    """A draft of 4 makes twice the tokens in the same time, so each round without one loses half a second."""
    tried = play(Trials(), 20_000, lambda _: 1.0, gain=0.25)
    assert 20 < tried.count(0) < 20_000 * 0.002 / 0.5 + 6


def test_no_length_is_given_up_for_good():
    trials = Trials()
    for rounds in (400, 50_000):
        assert 4 in play(trials, rounds, lambda k: 1.0 + 10 * k, length=0, gain=0.5)


def test_loads_have_trials_of_their_own():
    trials = Trials()
    play(trials, 60, lambda _: 1.0, gain=0.2)
    assert set(play(trials, 60, lambda _: 1.0, gain=0.2)) == {None}
    assert 0 in play(trials, 60, lambda _: 1.0, gain=0.2, key="other")
