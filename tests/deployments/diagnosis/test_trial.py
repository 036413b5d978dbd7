import click
import pytest

from deployments.config import AppConfig
from deployments.diagnosis import trial
from deployments.diagnosis.trial import Figures, read_texts, speed_finding, take_turns, trial_findings

PLAIN = Figures(num_tokens=100, seconds=10, num_rounds=100, round_s=10, num_accepted=0)
DRAFTED = Figures(num_tokens=100, seconds=5, num_rounds=40, round_s=5, num_accepted=60)


@pytest.mark.parametrize(
    ("seconds", "level", "advice"),
    [(5, "ok", ""), (4.4, "ok", ""), (6, "warning", "outside the rounds"), (4.2, "warning", "outside the rounds")],
)
def test_a_speed_up_more_than_15_percent_from_the_prediction_is_a_warning(seconds, level, advice):
    finding = speed_finding("trial", PLAIN, DRAFTED._replace(seconds=seconds))
    assert (finding.level, advice in finding.advice) == (level, True)
    assert f"measured speed-up {10 / seconds:.2f}, predicted 2.00" in finding.found


def test_drafts_that_do_not_pay_are_a_warning():
    finding = speed_finding("trial", PLAIN, DRAFTED._replace(seconds=12, round_s=12))
    assert (finding.level, finding.advice[:16]) == ("warning", "drafts cost more")
    assert speed_finding("trial", PLAIN, PLAIN._replace(seconds=10.5)).level == "ok", "there were none"


def test_both_ways_decode_the_same_texts_and_each_is_first_in_turn():
    calls = []

    def decode(text, seed, has_draft):
        calls.append((text, seed, has_draft))
        return DRAFTED if has_draft else PLAIN

    plain, drafted = take_turns(decode)
    assert [has_draft for _, _, has_draft in calls[1:]] == [True, False, False, True]
    assert [call[:2] for call in calls[1:] if call[2]] == [call[:2] for call in calls[1:] if not call[2]]
    assert (plain.seconds, drafted.num_accepted) == (20, 120)


def test_the_bundled_pair_is_tried():
    (finding,) = trial_findings(AppConfig())
    assert finding.subject == "trial"
    assert float(finding.found.split("; ")[1].split()[0]) > 2, "tokens a round"


def test_a_trial_that_makes_no_sense_is_left_out(monkeypatch):
    for settings, reason in ({"speculation": "off"}, "allow no drafts"), ({"execution": "vllm"}, "of its own"):
        (finding,) = trial_findings(AppConfig.model_validate(settings))
        assert reason in finding.found
    monkeypatch.setattr(trial, "_MAX_WEIGHT_BYTES", 1)
    (finding,) = trial_findings(AppConfig())
    assert "takes too long" in finding.found


def test_texts_are_blocks_of_a_file(tmp_path):
    (tmp_path / "texts").write_text("one\n\n\ntwo\nlines\n")
    assert read_texts(tmp_path / "texts") == ["one", "two\nlines"]
    (tmp_path / "texts").write_text("\n")
    with pytest.raises(click.ClickException, match="no text"):
        read_texts(tmp_path / "texts")
