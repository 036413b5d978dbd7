"""How likely draft tokens are accepted: by place, and by the request's own history."""

import random

import pytest

from engine.control.survival import Prior, Survival
from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain

K = 4


def request(name="a", **params):
    return Request(name, [1, 2], 2, SamplingParams(**params))


def teach(survival, asked, rate, rounds, *, length=K, seed=1):
    chance, history = random.Random(seed), survival.history(asked, 1)
    for _ in range(rounds):
        accepted = next((i for i in range(length) if chance.random() > rate), length)
        survival.observe(history, chain([7] * length), list(range(accepted)))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_a_requests_own_acceptance_dominates_after_a_few_rounds(rate):
    survival = Survival(Prior.of(K))
    teach(survival, request(), rate, 30)
    assert survival.chances(survival.history(request(), 1), 2) == pytest.approx([rate, rate**2], abs=0.17)


def test_places_differ():
    survival, chance = Survival(Prior.of(3)), random.Random(1)
    for nth in range(60):
        history = survival.history(request(str(nth)), 1)
        for _ in range(20):
            accepted = next((i for i, rate in enumerate((0.9, 0.5, 0.1)) if chance.random() > rate), 3)
            survival.observe(history, chain([7] * 3), list(range(accepted)))
    gains = survival.chances(survival.history(request("new"), 1), 3)
    assert gains == pytest.approx([0.9, 0.45, 0.045], abs=0.1)


def test_one_clients_requests_do_not_move_those_of_another_that_run():
    """What is planned for a request depends on its own verdicts alone, once it runs."""
    survival = Survival(Prior.of(K))
    teach(survival, request("b"), 0.8, 20)
    before = survival.chances(survival.history(request("b"), 1), K)
    for nth in range(100):
        teach(survival, request(f"a{nth}"), 0.001, 50)
    assert survival.chances(survival.history(request("b"), 1), K) == before


@pytest.mark.parametrize(
    "hostile", [{"temperature": 2.0}, {"logit_bias": {1: 100.0}}, {"repetition_penalty": 2.0}, {"temperature": 0.0}]
)
def test_requests_of_another_kind_do_not_even_move_those_that_come(hostile):
    survival = Survival(Prior.of(K))
    for nth in range(100):
        teach(survival, request(f"a{nth}", **hostile), 0.001, 50)
    assert survival.chances(survival.history(request("b"), 1), K) == pytest.approx(Prior.of(K).gains)


def test_an_endless_request_teaches_its_kind_a_bounded_amount():
    short, endless = Survival(Prior.of(K)), Survival(Prior.of(K))
    for survival, rounds in ((short, 64), (endless, 5000)):
        teach(survival, request("a"), 0.001, rounds)
    first = [survival.chances(survival.history(request("b"), 1), 1)[0] for survival in (short, endless)]
    assert first[1] > first[0] - 0.05
    teach(endless, request("b"), 0.9, 8)
    assert endless.chances(endless.history(request("b"), 1), 1)[0] > 0.65, "its own first rounds count for more"


def test_copies_are_learned_apart():
    survival = Survival(Prior.of(K))
    teach(survival, request(), 0.1, 50)
    copying = survival.history(request(), 1, is_copy=True)
    assert survival.chances(copying, 9)[0] == pytest.approx(0.7)
    assert len(survival.chances(copying, 9)) == 9


def test_a_tree_tells_what_each_smaller_tree_would_have_had_accepted():
    """The path of a verdict is 0, 1, 3 or only 2; the nodes come the best first."""
    survival, history = Survival(Prior.of(5, 1)), None
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 1])
    for nth in range(3000):
        history = survival.history(request(str(nth // 20)), nth)
        survival.observe(history, tree, [2] if nth % 4 == 0 else [0, 1, 3] if nth % 4 == 1 else [0, 1])
    first, second, third, fourth, never = survival.chances(history, 5)
    assert (first, second) == pytest.approx((0.75, 0.75), abs=0.1)
    assert (third, fourth) == pytest.approx((0.25, 0.25), abs=0.1)
    assert never <= fourth, "a node that was never requested is not likelier than those before it"


def test_of_several_chains_a_node_may_be_likelier_than_the_one_before_it_but_not_than_its_parent():
    gains = Prior.of(7, 3).gains
    assert gains[0] > gains[3] > gains[6] > gains[1] > gains[2]
    survival = Survival(Prior.of(7, 3))
    known = survival.chances(survival.history(request(), 1), 7)
    assert known == pytest.approx(gains)


def test_what_was_seen_long_ago_is_forgotten():
    survival = Survival(Prior.of(K))
    teach(survival, request("a"), 0.01, 50)
    survival.history(request("a"), 9)
    survival.forget(9)
    assert survival.chances(survival.history(request("a"), 9), 1)[0] < 0.2
    survival.forget(10)
    assert survival.history(request("a"), 10).offset.value == 0.0


def test_a_request_without_drafts_is_trusted_less_and_less():
    survival = Survival(Prior.of(K))
    teach(survival, request(), 0.01, 50)
    history = survival.history(request(), 1)
    hopeless, sure = survival.chances(history, 1)[0], history.offset.info
    for _ in range(300):
        history.offset.fade()
    assert survival.chances(history, 1)[0] > hopeless
    assert history.offset.info < sure
