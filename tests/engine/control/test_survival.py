"""How likely draft tokens are accepted: by place, and by the request's own history."""

import random

import pytest

from engine.control.survival import Survival
from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain

K = 4


def request(name="a", **params):
    return Request(name, [1, 2], 2, SamplingParams(**params))


def chances(survival, asked, length, **source):
    """The survival of each token of a request."""
    (gains,) = survival.chances([survival.history(asked, **source)], length)
    return gains.tolist()


def teach(survival, asked, rate, rounds, *, length=K, seed=1):
    chance, history = random.Random(seed), survival.history(asked)
    for _ in range(rounds):
        accepted = next((i for i in range(length) if chance.random() > rate), length)
        survival.observe(history, chain([7] * length), list(range(accepted)))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_a_requests_own_acceptance_dominates_after_a_few_rounds(rate):
    survival = Survival(K)
    teach(survival, request(), rate, 30)
    assert chances(survival, request(), 2) == pytest.approx([rate, rate**2], abs=0.17)


def test_places_differ():
    survival, chance = Survival(3), random.Random(1)
    for nth in range(60):
        history = survival.history(request(str(nth)))
        for _ in range(20):
            accepted = next((i for i, rate in enumerate((0.9, 0.5, 0.1)) if chance.random() > rate), 3)
            survival.observe(history, chain([7] * 3), list(range(accepted)))
    gains = chances(survival, request("new"), 3)
    assert gains == pytest.approx([0.9, 0.45, 0.045], abs=0.1)


def test_one_clients_requests_do_not_move_those_of_another_that_run():
    """What is planned for a request depends on its own verdicts alone, once it runs."""
    survival = Survival(K)
    teach(survival, request("b"), 0.8, 20)
    before = chances(survival, request("b"), K)
    for nth in range(100):
        teach(survival, request(f"a{nth}"), 0.001, 50)
    assert chances(survival, request("b"), K) == before


@pytest.mark.parametrize(
    "hostile", [{"temperature": 2.0}, {"logit_bias": {1: 100.0}}, {"repetition_penalty": 2.0}, {"temperature": 0.0}]
)
def test_requests_of_another_kind_do_not_even_move_those_that_come(hostile):
    survival = Survival(K)
    for nth in range(100):
        teach(survival, request(f"a{nth}", **hostile), 0.001, 50)
    assert chances(survival, request("b"), K) == pytest.approx([0.7**place for place in range(1, K + 1)])


def test_an_endless_request_teaches_its_kind_a_bounded_amount():
    short, endless = Survival(K), Survival(K)
    for survival, rounds in ((short, 64), (endless, 5000)):
        teach(survival, request("a"), 0.001, rounds)
    first = [chances(survival, request("b"), 1)[0] for survival in (short, endless)]
    assert first[1] > first[0] - 0.05
    teach(endless, request("b"), 0.9, 8)
    assert chances(endless, request("b"), 1)[0] > 0.65, "its own first rounds count for more"


def test_copies_are_learned_apart():
    survival = Survival(K)
    teach(survival, request(), 0.1, 50)
    copying = chances(survival, request(), 9, is_copy=True)
    assert (len(copying), copying[0]) == (9, pytest.approx(0.7))


def test_a_tree_tells_what_each_smaller_tree_would_have_had_accepted():
    """The path of a verdict is 0, 1, 3 or only 2; the nodes come the best first."""
    survival, history = Survival(5, 1), None
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 1])
    for nth in range(3000):
        history = survival.history(request(str(nth // 20)))
        survival.observe(history, tree, [2] if nth % 4 == 0 else [0, 1, 3] if nth % 4 == 1 else [0, 1])
    first, second, third, fourth, never = survival.chances([history], 5)[0]
    assert (first, second) == pytest.approx((0.75, 0.75), abs=0.1)
    assert (third, fourth) == pytest.approx((0.25, 0.25), abs=0.1)
    assert never <= fourth, "a node that was never requested is not likelier than those before it"


def test_of_several_chains_a_node_may_be_likelier_than_the_one_before_it_but_not_than_its_parent():
    gains = chances(Survival(7, 3), request(), 7)
    assert gains[0] > gains[3] > gains[6] > gains[1] > gains[2]
    assert gains[:4] == pytest.approx([0.7, 0.7 * 0.3, 0.7 * 0.3**2, 0.7**2])


def test_what_nobody_asks_for_is_forgotten():
    survival = Survival(K)
    teach(survival, request("a"), 0.01, 50)
    for _ in range(3):
        survival.forget()
        assert chances(survival, request("a"), 1)[0] < 0.2
    survival.forget()
    survival.forget()
    assert survival.history(request("a")).offset.odds == [0.0]
