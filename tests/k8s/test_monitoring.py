"""Alerts fire when they should and not otherwise; the dashboard's queries have data in the series of a server."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments.observe.metrics import IngressMetrics, ReplicaMetrics, RouterMetrics, exposition
from tests.deployments.fakes import Rig
from tests.k8s.manifests import K8S, Manifest

FOLDER = K8S / "components" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is in Debian's package prometheus")


def rule_groups() -> Manifest:
    """Return the groups of alerts, as Prometheus reads them from a file."""
    rule: Manifest = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    groups: Manifest = rule["spec"]
    return groups


def write_rules(folder: Path) -> Path:
    """Write the alerts for Prometheus' programs."""
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rule_groups()))
    return path


def tried(test: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Whether promtool finds what a unit test of the rules expects, and what it says."""
    path, every_minute = folder / "test.yaml", {"interval": "1m"}
    rules = {"rule_files": [str(write_rules(folder))], "evaluation_interval": "1m", "tests": [test | every_minute]}
    path.write_text(yaml.safe_dump(rules))
    ran = subprocess.run([str(PROMTOOL), "test", "rules", path], capture_output=True, text=True, check=False)
    return ran.returncode == 0, ran.stdout + ran.stderr


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


def firing(changes: list[dict[str, str]], folder: Path) -> list[str]:
    """The alerts that fire half an hour after these series have begun, by promtool's own evaluation."""
    changed = {name(entry) for entry in changes}
    kept = [entry for entry in HEALTHY if name(entry) not in changed]
    # Nothing may fire: promtool fails, and lists what does.
    alerts = [{"eval_time": "30m", "alertname": alert, "exp_alerts": []} for alert in TROUBLES]
    is_calm, output = tried({"input_series": [*kept, *changes], "alert_rule_test": alerts}, folder)
    fired = [alert for alert in TROUBLES if f'alertname="{alert}"' in output]
    assert is_calm == (not fired), output
    return fired


def name(entry: dict[str, str]) -> str:
    return entry["series"].partition("{")[0]


@needs_promtool
def test_promtool_accepts_the_alerts(tmp_path: Path) -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", write_rules(tmp_path)], check=True, capture_output=True)


@needs_promtool
@pytest.mark.parametrize("alert", TROUBLES)
def test_an_alert_fires(alert: str, tmp_path: Path) -> None:
    assert alert in firing(TROUBLES[alert], tmp_path)


@needs_promtool
@pytest.mark.parametrize("state", CALM)
def test_no_alert_fires_without_need(state: str, tmp_path: Path) -> None:
    assert firing(CALM[state], tmp_path) == []


def test_every_alert_is_tried_and_explained() -> None:
    alerts = {rule["alert"] for group in rule_groups()["groups"] for rule in group["rules"]}
    assert alerts == TROUBLES.keys()
    readme = (K8S / "README.md").read_text()
    assert [alert for alert in alerts if f"`{alert}`" not in readme] == []


RAYS = (
    "serve_autoscaling_desired_replicas",
    "serve_autoscaling_target_replicas",
    "serve_deployment_replica_healthy",
)
"""What Ray's exporter adds, each with the prefix `ray_`."""


def exposed() -> list[dict[str, str]]:
    """The series of a Router whose drafts were lost and prepared in vain, of an Ingress, and of Ray's exporter."""
    rig, ingress = Rig(), IngressMetrics()
    rig.engine.stats.observe_draft(3, 2)
    rig.engine.stats.num_rounds_by_length[3, "goodput"] += 1
    rig.remote_drafter.fallbacks["absent"] += 1
    preparing: Any = SimpleNamespace(hits=1, misses=Counter(late=1), num_forwards=1, num_wasted=1)
    rig.remote_drafter.run_ahead = preparing
    router = RouterMetrics(rig.engine, rig.remote_drafter, rig.remote_verifier, has_draft=True)
    router.observe_finished("length", 0.1)
    ingress.resubmissions["router_lost"] += 1
    replicas = [ReplicaMetrics("router", router.collect()), ReplicaMetrics("ingress", ingress.collect())]
    families = text_string_to_metric_families(exposition(replicas, "paceline").decode())
    samples = [sample for family in families for sample in family.samples]
    rays = [series(f"ray_{name}", "0+1x40", deployment="Router") for name in RAYS]
    return [*(series(sample.name, "0+1x40", **sample.labels) for sample in samples), *rays]


def test_rays_metrics_are_still_rays() -> None:
    sources = "".join(path.read_text() for path in Path(serve.__file__).parent.glob("_private/*.py"))
    assert [name for name in RAYS if f'"{name}"' not in sources] == []


@needs_promtool
async def test_every_query_of_the_dashboard_has_data_and_every_metric_of_an_alert_exists(tmp_path: Path) -> None:
    known = exposed()
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = [query.replace("$__rate_interval", "5m").replace("$namespace", "ml") for query in queries]
    has_data = [{"labels": "{}", "value": 1}]
    expected = [
        {"expr": f"count(({query}) > -Inf) > bool 0", "eval_time": "30m", "exp_samples": has_data} for query in asked
    ]
    is_right, output = tried({"input_series": known, "promql_expr_test": expected}, tmp_path)
    assert is_right, output
    alerts = [rule["expr"] for group in rule_groups()["groups"] for rule in group["rules"]]
    named = {found for rule in alerts for found in re.findall(r"\b(?:vllm:|paceline:|ray_)\w+", rule)}
    assert named - {name(entry) for entry in known} == set()
