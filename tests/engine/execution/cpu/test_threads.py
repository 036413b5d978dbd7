"""Threads: the fewest that are about as fast as any, for each kind of pass."""

from types import SimpleNamespace

import pytest
import torch

from engine.config import ModelConfig
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu import threads
from engine.execution.cpu.threads import fit_threads
from engine.models.causal_lm import CausalLM
from tests.cluster.models import save_llama

SECONDS = {
    1: {1: 1.0, 2: 0.99, 4: 1.05, 6: 1.1},  # one row: a second thread gains nothing
    8: {1: 1.0, 2: 0.5, 4: 0.49, 6: 0.7},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return CausalLM.load(ModelConfig(str(save_llama(tmp_path_factory.mktemp("model"), seed=1)), compile="off"))


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def test_the_fewest_of_the_fastest_are_kept_for_each_kind_of_pass(model, monkeypatch):
    def measure(_, counts, rows, length):
        if length == 5:
            return [SECONDS[rows][count] for count in counts]
        return [1 / count if length == 512 else 1.0 for count in counts]  # short prompts gain nothing either

    monkeypatch.setattr(threads, "_measure", measure)
    assert str(fit_threads(model, 6)) == "1 for decoding, 2 for a batch, 1 for prompts, 6 for long prompts"
    for num_tokens, count in [(1, 1), (5, 1), (6, 2), (40, 2), (41, 1), (128, 1), (129, 6), (1000, 6)]:
        model.threads.use(num_tokens)
        assert torch.get_num_threads() == count


def test_a_little_slower_each_time_is_not_about_as_fast(model, monkeypatch):
    """Each number is compared with the fastest, not with the one before it."""
    seconds = {8: 1.0, 4: 1.06, 2: 1.12, 1: 1.18}
    monkeypatch.setattr(threads, "_measure", lambda _, counts, *__: [seconds[count] for count in counts])
    assert str(fit_threads(model, 8)).startswith("4 for decoding")
    assert str(fit_threads(model, 8, worth=0.8)).startswith("1 for decoding")


def test_numbers_take_turns_and_the_first_pass_of_a_turn_is_not_counted(model, monkeypatch):
    """A machine that becomes slow halfway is so for both; that threads must be made first is no cost of a pass."""
    order = []
    clock = iter(range(10_000))
    monkeypatch.setattr(model, "forward", lambda _: order.append(torch.get_num_threads()))
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(threads, "_MAX_TURN_S", float("inf"))
    monkeypatch.setattr(threads, "_MAX_TRIAL_S", float("inf"))
    assert threads._measure(model, (2, 1), 1, 5) == [1, 1]
    assert order == ([2] * (1 + threads._PASSES_OF_TURN) + [1] * (1 + threads._PASSES_OF_TURN)) * threads._NUM_TURNS


def test_a_pass_that_takes_long_is_counted_once_in_each_of_two_turns(model, monkeypatch):
    seconds = iter(range(10_000))
    order = []
    monkeypatch.setattr(model, "forward", lambda _: order.append(torch.get_num_threads()))
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    assert threads._measure(model, (2, 1), 1, 5) == [1, 1]
    assert order == [2, 2, 1, 1] * 2


def test_a_pass_runs_with_the_threads_of_its_size(model):
    """Also the measuring is real here."""
    fit_threads(model, 2)
    model.threads = threads.Threads(((5, 2), (40, 1)))
    kv = model.kv_tensors(4, 16)
    for length, count in [(3, 2), (20, 1), (5, 2)]:
        model.forward(build([ForwardRow([1] * length, 0, [1, 2], 1)], kv))
        assert torch.get_num_threads() == count
