"""problems: everything that is wrong with the objects of a kustomization, in sentences."""

from deployments.config import AppConfig
from tests.k8s.manifests import Manifest, of_kind
from tests.k8s.object_rules import object_problems
from tests.k8s.operator_rules import operator_problems
from tests.k8s.pod_rules import pod_problems
from tests.k8s.schemas import schema_problems
from tests.k8s.serving_rules import app_config, serving_problems


def problems(manifests: list[Manifest]) -> list[str]:
    """Return what the API server, KubeRay, Serve or the application would refuse, and what would not work."""
    # Each kind of check relies on those before it.
    refused = [problem for manifest in manifests for problem in schema_problems(manifest)]
    if refused:
        return refused
    services, clusters = of_kind(manifests, "RayService"), of_kind(manifests, "RayCluster")
    refused = [problem for service in services for problem in serving_problems(service)]
    if refused:
        return refused
    found = [problem for manifest in services + clusters for problem in operator_problems(manifest)]
    for service in services:
        found += pod_problems(service, app_config(service))
    for cluster in clusters:
        found += pod_problems(cluster, AppConfig())
    return [*found, *object_problems(manifests)]
