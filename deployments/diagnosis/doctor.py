"""All checks of this machine and a pair: those before a start, and the worst findings of the quick ones."""

from deployments.config import AppConfig
from deployments.diagnosis.finding import LEVELS, Finding
from deployments.diagnosis.machine import gpu_finding, machine_findings, port_finding
from deployments.diagnosis.models import pair_findings, path_findings
from deployments.diagnosis.trial import trial_findings


def local_findings(config: AppConfig, port: int) -> list[Finding]:
    """Check this machine and a pair; what needs the models is checked only if there is no error."""
    found = [*machine_findings(config), port_finding(port), gpu_finding(), *path_findings(config)]
    for check in (pair_findings, trial_findings):
        if not any(finding.level == "error" for finding in found):
            found += check(config)
    return found


def worst(config: AppConfig, count: int = 2) -> list[Finding]:
    """Return the worst findings of what can be checked within a fraction of a second; none that is ok."""
    findings = (*machine_findings(config), *path_findings(config))
    bad = [finding for finding in findings if finding.level != "ok"]
    return sorted(bad, key=lambda finding: list(LEVELS).index(finding.level))[:count]
