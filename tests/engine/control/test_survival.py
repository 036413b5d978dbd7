"""How likely draft tokens are accepted: by place, by the request's own history, and by the drafter's confidence."""

import math
import random

import pytest

from engine.control.survival import Prior, Reliability, Survival
from engine.params import SamplingParams
from engine.protocols import Draft, Request, chain
from tests.engine.control.simulation import Row

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
    assert survival.before(survival.history(request(), 1), 2) == pytest.approx([rate, rate**2], abs=0.17)


def test_places_differ():
    survival, chance = Survival(Prior.of(3)), random.Random(1)
    for nth in range(60):
        history = survival.history(request(str(nth)), 1)
        for _ in range(20):
            accepted = next((i for i, rate in enumerate((0.9, 0.5, 0.1)) if chance.random() > rate), 3)
            survival.observe(history, chain([7] * 3), list(range(accepted)))
    gains = survival.before(survival.history(request("new"), 1), 3)
    assert gains == pytest.approx([0.9, 0.45, 0.045], abs=0.1)


def test_one_clients_requests_do_not_move_those_of_another_that_run():
    """What is planned for a request depends on its own verdicts alone, once it runs."""
    survival = Survival(Prior.of(K))
    teach(survival, request("b"), 0.8, 20)
    before = survival.before(survival.history(request("b"), 1), K)
    for nth in range(100):
        teach(survival, request(f"a{nth}"), 0.001, 50)
    assert survival.before(survival.history(request("b"), 1), K) == before


@pytest.mark.parametrize(
    "hostile", [{"temperature": 2.0}, {"logit_bias": {1: 100.0}}, {"repetition_penalty": 2.0}, {"temperature": 0.0}]
)
def test_requests_of_another_kind_do_not_even_move_those_that_come(hostile):
    survival = Survival(Prior.of(K))
    for nth in range(100):
        teach(survival, request(f"a{nth}", **hostile), 0.001, 50)
    assert survival.before(survival.history(request("b"), 1), K) == pytest.approx(Prior.of(K).gains)


def test_an_endless_request_teaches_its_kind_a_bounded_amount():
    short, endless = Survival(Prior.of(K)), Survival(Prior.of(K))
    for survival, rounds in ((short, 64), (endless, 5000)):
        teach(survival, request("a"), 0.001, rounds)
    first = [survival.before(survival.history(request("b"), 1), 1)[0] for survival in (short, endless)]
    assert first[1] > first[0] - 0.05
    teach(endless, request("b"), 0.9, 8)
    assert endless.before(endless.history(request("b"), 1), 1)[0] > 0.65, "its own first rounds count for more"


def test_copies_are_learned_apart():
    survival = Survival(Prior.of(K))
    teach(survival, request(), 0.1, 50)
    copying = survival.history(request(), 1, is_copy=True)
    assert survival.before(copying, 9)[0] == pytest.approx(0.7)
    assert len(survival.before(copying, 9)) == 9


def confident(rows, rounds, *, seed=1):
    """Rounds of drafters that say how sure they are; the reliability of the second half of the rounds."""
    survival, chance = Survival(Prior.of(K)), random.Random(seed)
    for nth in range(rounds):
        if nth == rounds // 2:
            survival.reliability = Reliability()
        for i, row in enumerate(rows):
            rates, sure = row.draft(chance, K)
            draft = Draft([7] * K, list(range(-1, K - 1)), confidences=sure)
            history = survival.history(request(f"{i}-{nth // 100}", temperature=row.params.temperature), nth)
            survival.after(history, draft)
            accepted = next((i for i in range(K) if chance.random() > rates[i]), K)
            survival.observe(history, draft, list(range(accepted)))
    return survival


@pytest.mark.parametrize("bias", [-1.5, 0.0, 2.0])
def test_predictions_are_calibrated_within_five_points(bias):
    """Drafters that are far too sure or unsure, requests that are easy and hard: every bin with enough tokens."""
    reliability = confident([Row(rate, 1.5, bias) for rate in (0.3, 0.6, 0.9)], 800).reliability
    bins = zip(reliability.counts, reliability.predicted, reliability.accepted, strict=True)
    errors = [abs(sure - kept) / count for count, sure, kept in bins if count > 150]
    assert len(errors) >= 8
    assert max(errors) < 0.05
    assert reliability.error < 0.03


def test_a_surer_token_never_survives_less():
    survival = confident([Row(0.6, 2.0, 1.0)], 300)
    places = [i / 10 for i in range(101)]
    curve = survival.history(request("0-0", temperature=1.0), 1).kind.confidences
    odds = [curve.at(place) for place in places]
    assert odds == sorted(odds)


def test_a_node_survives_if_its_path_does():
    survival = Survival(Prior.of(K, 1))
    draft = Draft([5, 6, 7, 8], [-1, -1, 0, 2], confidences=[0.5, 0.4, 0.5, 0.5])
    assert survival.after(survival.history(request(), 1), draft) == pytest.approx([0.5, 0.4, 0.25, 0.125])


def test_without_confidences_survival_is_that_before_drafting():
    survival = Survival(Prior.of(K))
    history = survival.history(request(), 1)
    assert survival.after(history, chain([5, 6, 7])) == survival.before(history, 3)


def test_a_token_that_was_cut_counts_as_it_was_predicted():
    """Drafts whose second token is always cut, as it is hopeless: the places do not look better than they are."""
    survival = Survival(Prior.of(2))
    history = survival.history(request(), 1)
    for _ in range(200):
        survival.after(history, Draft([5, 6], [-1, 0], confidences=[0.98, 0.02]))
        survival.observe(history, Draft([5], [-1], confidences=[0.98]), [0])
    assert survival.before(history, 2)[1] < 0.6
    assert survival.before(history, 2)[1] < 0.75 * survival.before(history, 2)[0]


def test_a_tree_tells_what_each_smaller_tree_would_have_had_accepted():
    """The path of a verdict is 0, 1, 3 or only 2; the nodes come the best first."""
    survival, history = Survival(Prior.of(5, 1)), None
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 1])
    for nth in range(3000):
        history = survival.history(request(str(nth // 20)), nth)
        survival.observe(history, tree, [2] if nth % 4 == 0 else [0, 1, 3] if nth % 4 == 1 else [0, 1])
    first, second, third, fourth, never = survival.before(history, 5)
    assert (first, second) == pytest.approx((0.75, 0.75), abs=0.1)
    assert (third, fourth) == pytest.approx((0.25, 0.25), abs=0.1)
    assert never <= fourth, "a node that was never requested is not likelier than those before it"


def test_of_several_chains_a_node_may_be_likelier_than_the_one_before_it_but_not_than_its_parent():
    gains = Prior.of(7, 3).gains
    assert gains[0] > gains[3] > gains[6] > gains[1] > gains[2]
    survival = Survival(Prior.of(7, 3))
    known = survival.before(survival.history(request(), 1), 7)
    assert known == pytest.approx(gains)


def test_what_was_seen_long_ago_is_forgotten():
    survival = Survival(Prior.of(K))
    teach(survival, request("a"), 0.01, 50)
    survival.history(request("a"), 9)
    survival.forget(9)
    assert survival.before(survival.history(request("a"), 9), 1)[0] < 0.2
    survival.forget(10)
    assert survival.history(request("a"), 10).before.value == 0.0


def test_a_request_without_drafts_is_trusted_less_and_less():
    survival = Survival(Prior.of(K))
    teach(survival, request(), 0.01, 50)
    history = survival.history(request(), 1)
    hopeless, sure = survival.before(history, 1)[0], history.before.info
    for _ in range(300):
        history.before.fade()
    assert survival.before(history, 1)[0] > hopeless
    assert history.before.info < sure


def test_reliability_is_counted_in_bins():
    reliability = Reliability()
    for predicted, accepted in ((0.05, False), (0.95, True), (0.91, False), (1.0, True)):
        reliability.observe(predicted, accepted=accepted)
    assert (reliability.counts[0], reliability.counts[9]) == (1, 3)
    assert reliability.accepted[9] == 2
    assert reliability.predicted[9] == pytest.approx(2.86)
    assert reliability.error == pytest.approx((0.05 + 0.86) / 4)
    assert math.isfinite(Reliability().error)
