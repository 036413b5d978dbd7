"""The dashboard's queries, the alerts, and Prometheus' own programs to try them with."""

import json
import re
import shutil
from pathlib import Path

import yaml

from tests.k8s.manifests import K8S, Manifest

FOLDER = K8S / "components" / "monitoring"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
WITHOUT_PROMETHEUS = "promtool and prometheus are in Debian's package prometheus"


def dashboard() -> Manifest:
    """Return Grafana's dashboard."""
    loaded: Manifest = json.loads((FOLDER / "dashboard.json").read_text())
    return loaded


def queries(*, window: str, namespace: str) -> dict[str, str]:
    """Return the dashboard's queries by panel and legend, over one window and for one namespace."""
    found = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", window).replace("$namespace", namespace)
            found[f"{panel['title']}: {target['legendFormat']}"] = query
    return found


def rule_groups() -> Manifest:
    """Return the groups of alerts, as Prometheus reads them from a file."""
    rule: Manifest = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    groups: Manifest = rule["spec"]
    return groups


def metric_names(query: str) -> set[str]:
    """Return the names of metrics in a query: words with a prefix that is ours, vLLM's or Ray's."""
    return set(re.findall(r"\b(?:vllm:|paceline:|ray_)\w+", query))


def write_rules(folder: Path) -> Path:
    """Write the alerts for Prometheus' programs."""
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rule_groups()))
    return path
