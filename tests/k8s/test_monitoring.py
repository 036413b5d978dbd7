"""Alerts fire when they should and not otherwise; dashboard and alerts name metrics that the server has."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.manifests import K8S
from tests.k8s.monitoring import PROMTOOL, WITHOUT_PROMETHEUS, rule_groups, write_rules

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=WITHOUT_PROMETHEUS)

LABELS = 'namespace="ml"'
WANTED = f'ray_serve_autoscaling_desired_replicas{{{LABELS}, deployment="Router"}}'
TARGET = f'ray_serve_autoscaling_target_replicas{{{LABELS}, deployment="Router"}}'


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    """One series of a unit test of rules: `a+bxn` is a, a + b, ... with n more values, one a minute; `_` is none."""
    written = ", ".join([LABELS, *(f'{label}="{value}"' for label, value in labels.items())])
    return {"series": f"{name}{{{written}}}", "values": values}


HEALTHY = [
    series("vllm:num_requests_running", "3x40"),
    series("vllm:num_requests_waiting", "0x40"),
    series("paceline:rounds_total", "0+3000x40", phase="decode"),
    series("paceline:target_recoveries_total", "0x40"),
    series("paceline:drafter_fallbacks_total", "0+10x40", reason="timeout"),
    series("vllm:spec_decode_num_draft_tokens_total", "0+10000x40"),
    series("vllm:spec_decode_num_accepted_tokens_total", "0+6000x40"),
    series("paceline:draft_problem", "0x40", problem="unused"),
    {"series": WANTED, "values": "2x40"},
    {"series": TARGET, "values": "2x40"},
]
"""A service that does well, for 40 minutes."""

TROUBLES = {
    "PacelineNoMetrics": [series("vllm:num_requests_running", "_x40")],
    "PacelineNoProgress": [series("paceline:rounds_total", "0+3000x5 15000x35", phase="decode")],
    "PacelineTargetRestarts": [series("paceline:target_recoveries_total", "0x20 1 2 2x18")],
    "PacelineDraftLost": [series("paceline:drafter_fallbacks_total", "0+2900x40", reason="absent")],
    "PacelineAcceptanceCollapsed": [series("vllm:spec_decode_num_accepted_tokens_total", "0+500x40")],
    "PacelineDraftOfNoUse": [series("paceline:draft_problem", "1x40", problem="unused")],
    "PacelineLoops": [series("vllm:spec_decode_num_accepted_tokens_total", "0+9900x40")],
    "PacelineQueueGrows": [series("vllm:num_requests_waiting", "0+5x40"), {"series": WANTED, "values": "4x40"}],
}
"""What differs from a healthy service when each alert should fire."""

CALM: dict[str, list[dict[str, str]]] = {
    "all is well": [],
    "a queue that autoscaling is about to shorten": [series("vllm:num_requests_waiting", "0+5x40")],
    "a queue that gets shorter": [
        series("vllm:num_requests_waiting", "200-4x40"),
        {"series": WANTED, "values": "4x40"},
    ],
    "nobody asks for anything": [
        series("vllm:num_requests_running", "0x40"),
        series("paceline:rounds_total", "5000x40", phase="decode"),
        series("paceline:drafter_fallbacks_total", "10x40", reason="timeout"),
        series("vllm:spec_decode_num_draft_tokens_total", "500x40"),
        series("vllm:spec_decode_num_accepted_tokens_total", "20x40"),
    ],
    "a draft that was of no use for some minutes": [
        series("paceline:draft_problem", "0x20 1x8 0x20", problem="costs_more")
    ],
    "one restart of a target": [series("paceline:target_recoveries_total", "0x20 1x19")],
}
"""What differs from a healthy service, and is no reason for an alert."""


def firing(alert: str, changes: list[dict[str, str]], folder: Path) -> bool:
    """Whether an alert fires half an hour after these series have begun, by promtool's own evaluation."""
    changed = {name(entry) for entry in changes}
    kept = [entry for entry in HEALTHY if name(entry) not in changed]
    rules = write_rules(folder)
    test = {
        "input_series": [*kept, *changes],
        "interval": "1m",
        # Nothing may fire: promtool fails, and lists what does.
        "alert_rule_test": [{"eval_time": "30m", "alertname": alert, "exp_alerts": []}],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    ran = subprocess.run([str(PROMTOOL), "test", "rules", path], capture_output=True, text=True, check=False)
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0 or f'alertname="{alert}"' in output, output
    return ran.returncode != 0


def name(entry: dict[str, str]) -> str:
    return entry["series"].partition("{")[0]


@needs_promtool
def test_promtool_accepts_the_alerts(tmp_path: Path) -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", write_rules(tmp_path)], check=True, capture_output=True)


@needs_promtool
@pytest.mark.parametrize("alert", TROUBLES)
def test_an_alert_fires(alert: str, tmp_path: Path) -> None:
    assert firing(alert, TROUBLES[alert], tmp_path)


@needs_promtool
@pytest.mark.parametrize("state", CALM)
def test_no_alert_fires_without_need(state: str, tmp_path: Path) -> None:
    assert [alert for alert in TROUBLES if firing(alert, CALM[state], tmp_path)] == []


def test_every_alert_is_tried_and_explained() -> None:
    alerts = {rule["alert"] for group in rule_groups()["groups"] for rule in group["rules"]}
    assert alerts == TROUBLES.keys()
    readme = (K8S / "README.md").read_text()
    assert [alert for alert in alerts if f"`{alert}`" not in readme] == []
