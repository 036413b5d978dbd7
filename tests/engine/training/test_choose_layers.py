"""The search for sub-layers to skip: it goes on where it was ended, and its result is a setting."""

import builtins
import json
from dataclasses import replace

import pytest
from rich.console import Console

from engine import LLM, SamplingParams
from engine.training import choose_layers as search
from engine.training.__main__ import main
from engine.training.choose_layers import SearchOptions, choose_layers
from engine.training.errors import TrainingError
from engine.training.self_speculation import Costs
from tests.cluster.models import save_llama

pytest.importorskip("optuna", reason="it is an extra")

OPTIONS = SearchOptions(num_trials=4, max_draft_tokens=3, num_tokens=6)
PROMPTS = ["t2 t3 t4 t5", "t9 t8"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Times would depend on the machine."""
    monkeypatch.setattr(search, "measure_costs", lambda *_: Costs(2, 1.0, 0.1, 0.3, 0.4))


def run(target, output, options=OPTIONS, prompts=PROMPTS):
    return choose_layers(target, prompts, output, options, Console(quiet=True))


def test_the_result_is_a_setting_with_which_the_target_drafts(target, tmp_path):
    output = tmp_path / "chosen.json"
    choice = run(target, output)
    figures = json.loads(output.read_text())
    assert figures["self_draft_skip"] == choice.skipped
    assert (figures["num_trials"], len(figures["acceptance_per_position"])) == (4, 3)
    assert figures["expected_speedup"] == pytest.approx(choice.gain.speedup, abs=1e-4)
    settings = {"dtype": "float32", "device": "cpu", "compile": "off", "num_threads": 1, "num_blocks": 64}
    llm = LLM(target, drafting="self", self_draft_skip=f"@{output}", **settings)
    assert llm.engine.config.self_draft_skip == tuple(choice.skipped)
    llm.generate([[2, 3, 4]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert llm.stats.num_drafts > 0


def test_a_search_goes_on_where_it_was_ended_and_never_gets_worse(target, tmp_path, monkeypatch):
    output = tmp_path / "chosen.json"
    measured = []
    measure = search.measure_acceptance
    monkeypatch.setattr(search, "measure_acceptance", lambda *args: measured.append(args[1]) or measure(*args))
    first = run(target, output)
    assert measured[0] == ["attention.1", "mlp.1"], "the first layers alone are tried first"
    num_measured = len(measured)
    second = run(target, output, replace(OPTIONS, num_trials=7))
    assert second.num_trials == 7
    assert second.gain.speedup >= first.gain.speedup
    assert len(measured) - num_measured <= 3
    assert run(target, output, replace(OPTIONS, num_trials=7)) == second


def test_a_set_during_which_a_search_was_ended_is_measured_again_with_the_costs_of_the_first_run(
    target, tmp_path, monkeypatch
):
    output = tmp_path / "chosen.json"
    measure = search.measure_acceptance

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "measure_acceptance", end)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(target, output)
    measured = []
    monkeypatch.setattr(search, "measure_acceptance", lambda *args: measured.append(args[1]) or measure(*args))
    monkeypatch.setattr(search, "measure_costs", lambda *_: Costs(2, 1.0, 0.0, 0.0, 0.0))
    choice = run(target, output)
    assert measured.count(["attention.1", "mlp.1"]) == 1
    assert choice.num_trials == OPTIONS.num_trials
    assert choice.gain.cost_ratio == pytest.approx(Costs(2, 1.0, 0.1, 0.3, 0.4).ratio(choice.skipped))


def test_sets_that_cannot_be_the_best_are_not_measured(target, tmp_path, monkeypatch):
    """Nothing promises more than the first set here, of which every token is accepted at no cost."""
    measured = []
    monkeypatch.setattr(search, "measure_costs", lambda *_: Costs(2, 1.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(search, "measure_acceptance", lambda *args: measured.append(args[1]) or [1.0] * 3)
    assert run(target, tmp_path / "chosen.json", replace(OPTIONS, num_trials=8)).num_trials == 8
    assert len(measured) == 1


def test_no_set_is_measured_twice(target, tmp_path, monkeypatch):
    """Two layers have eleven sets to choose from, and every one could be the best here."""
    measured = []
    monkeypatch.setattr(search, "measure_acceptance", lambda *args: measured.append(args[1]) or [0.0] * 3)
    assert run(target, tmp_path / "chosen.json", replace(OPTIONS, num_trials=30)).num_trials == 30
    assert len(measured) > 3
    assert len({tuple(skipped) for skipped in measured}) == len(measured)


@pytest.mark.parametrize("change", ["options", "prompts"])
def test_trials_of_another_search_are_refused(change, target, tmp_path):
    output = tmp_path / "chosen.json"
    run(target, output)
    options = replace(OPTIONS, num_tokens=5) if change == "options" else OPTIONS
    with pytest.raises(TrainingError, match=r"chosen\.json\.trials holds the trials of another search"):
        run(target, output, options, ["t7"] if change == "prompts" else PROMPTS)


def test_without_optuna_the_command_says_what_to_install(target, tmp_path, monkeypatch, capsys):
    importing = builtins.__import__

    def fail(name, *args, **options):
        if name == "optuna":
            raise ImportError(name)
        return importing(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("t2 t3\n\nt4")
    arguments = ["--target", str(target), "--prompts", str(prompts), "--output", str(tmp_path / "chosen.json")]
    assert main(["choose-layers", *arguments]) == 1
    assert "choose-layers needs optuna; `pip install 'paceline[search]'` installs it" in capsys.readouterr().err


def test_the_command_searches_and_prints_the_setting(target, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "chosen.json"
    prompts.write_text("t2 t3\n\nt4")
    arguments = ["--target", str(target), "--prompts", str(prompts), "--output", str(output), "--trials", "2"]
    assert main(["choose-layers", *arguments, "--k", "2", "--tokens", "4"]) == 0
    assert f"self_draft_skip=@{output}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["choose-layers", *arguments, "--k", "0"])
