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


# --- Several drafts ------------------------------------------------------------------------------------------------

DOMAINS = ("code", "novels", "forms")


def serve(survival, domains, *, likely=0.8, unlikely=0.6, rounds=40, salt=b"", seed=1, only=None):
    """Draft for requests of these domains, one after the other, each best by the draft of its place in `DOMAINS`.

    Returns the draft of every round by request, and the tokens of a round on average.
    """
    chance, chosen, num_tokens = random.Random(seed), [], 0
    for nth, domain in enumerate(domains):
        asked = Request(f"{salt}{seed}{nth}", [1], 1, SamplingParams(), salt)
        chosen.append([])
        for _ in range(rounds):
            index = survival.choose_draft(asked) if only is None else only
            rate = likely if DOMAINS[index] == domain else unlikely
            accepted = next((i for i in range(K) if chance.random() > rate), K)
            survival.observe(survival.history(asked), chain([7] * K), list(range(accepted)), index)
            chosen[-1].append(index)
            num_tokens += accepted + 1
    return chosen, num_tokens / (rounds * len(domains))


def test_each_request_settles_on_the_draft_of_its_domain_which_pays_in_mixed_traffic():
    domains = random.Random(0).choices(DOMAINS, k=120)
    chosen, mixed = serve(Survival(K, num_drafts=3), domains)
    late = [DOMAINS[index] == domain for domain, each in zip(domains, chosen, strict=True) for index in each[12:]]
    assert sum(late) > 0.8 * len(late)
    best = max(serve(Survival(K, num_drafts=3), domains, only=index)[1] for index in range(3))
    assert mixed > 1.1 * best


@pytest.mark.parametrize("place", range(3))
def test_in_traffic_of_one_domain_little_is_lost_by_trying(place):
    domains = [DOMAINS[place]] * 60
    best = serve(Survival(K, num_drafts=3), domains, only=place)[1]
    assert serve(Survival(K, num_drafts=3), domains)[1] > 0.97 * best


def test_requests_begin_with_what_others_of_their_salt_have_taught_and_no_others():
    survival = Survival(K, num_drafts=3)
    serve(survival, ["forms"] * 30, salt=b"one")
    assert serve(survival, ["forms"], rounds=1, salt=b"one", seed=2)[0] == [[2]]
    assert serve(survival, ["code"], rounds=1, salt=b"another")[0] == [[0]]


def test_a_text_that_changes_its_domain_changes_its_draft():
    survival, asked = Survival(K, num_drafts=2), request()
    history = survival.history(asked)
    for accepting in (0, 1, 0):
        chosen = []
        for _ in range(40):
            chosen.append(survival.choose_draft(asked))
            path = list(range(K if chosen[-1] == accepting else 0))
            survival.observe(history, chain([7] * K), path, chosen[-1])
        assert chosen[-1] == accepting


def test_a_draft_that_was_worse_is_tried_again():
    survival, asked = Survival(K, num_drafts=2), request()
    chosen = []
    for _ in range(1500):
        chosen.append(survival.choose_draft(asked))
        path = list(range(3 if chosen[-1] == 0 else 1))
        survival.observe(survival.history(asked), chain([7] * K), path, chosen[-1])
    assert 0 < chosen[100:].count(1) < 0.05 * len(chosen)


def test_copies_say_nothing_about_drafts():
    survival, asked = Survival(K, num_drafts=2), request()
    for _ in range(20):
        survival.observe(survival.history(asked, is_copy=True), chain([7] * K), [], 0)
    assert survival.choose_draft(asked) == survival.choose_draft(request("new")) == 0


def test_memory_of_salts_is_bounded():
    survival = Survival(K, num_drafts=2)
    for nth in range(300):
        serve(survival, ["code"], rounds=1, salt=b"%d" % nth)
    assert len(survival._salts) <= 64
