"""All checks of this machine and a pair, and the worst findings of the quick checks."""

from deployments.config import AppConfig
from deployments.diagnosis.finding import LEVELS, Finding
from deployments.diagnosis.machine import gpu_finding, machine_findings, port_finding
from deployments.diagnosis.models import pair_findings, path_findings
from deployments.diagnosis.trial import trial_findings


def local_findings(config: AppConfig, port: int) -> list[Finding]:
    """Check this machine and a pair; the models are loaded only if there is no error before."""
    findings = [*machine_findings(config), port_finding(port), gpu_finding(), *path_findings(config)]
    for check in (pair_findings, trial_findings):
        if not any(finding.level == "error" for finding in findings):
            findings += check(config)
    return findings


def worst(config: AppConfig, count: int = 2) -> list[Finding]:
    """Return the worst errors and warnings of the checks that take a fraction of a second."""
    findings = (*machine_findings(config), *path_findings(config))
    bad = [finding for finding in findings if finding.level != "ok"]
    return sorted(bad, key=lambda finding: list(LEVELS).index(finding.level))[:count]
