"""problems: everything that is wrong with the objects of a kustomization, in sentences."""

from collections.abc import Iterator

from deployments.config import AppConfig
from tests.k8s.manifests import Manifest, cluster_of, groups_of, of_kind
from tests.k8s.operator_rules import operator_problems
from tests.k8s.pod_rules import pod_problems
from tests.k8s.schemas import schema_problems
from tests.k8s.serving_rules import app_config, serving_problems

SECRETS_OF_OPERATORS = {"paceline-api-keys", "paceline-redis"}
"""Made by hand, because nobody should know what is in them."""
DASHBOARD_PORT = 8265


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
    return [*found, *_object_problems(manifests)]


def _object_problems(manifests: list[Manifest]) -> Iterator[str]:
    """Yield references that lead nowhere: selectors, ports, volumes; and disruption budgets that cannot work."""
    pods = list(_pods(manifests))
    for manifest in of_kind(manifests, "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "Service"):
        name, spec = f"{manifest['kind']} {manifest['metadata']['name']}", manifest["spec"]
        selector = spec.get("podSelector") or spec.get("selector", {})
        labels = selector.get("matchLabels", selector if manifest["kind"] == "Service" else {})
        selected = [pod for pod in pods if labels and labels.items() <= pod["metadata"]["labels"].items()]
        if not selected:
            yield f"{name} selects no pod"
        ports = {port["name"] for pod in selected for c in pod["spec"]["containers"] for port in c.get("ports", [])}
        yield from (f"{name} names the port {port}, which no pod has" for port in _ports(manifest) - ports)
        if manifest["kind"] == "PodDisruptionBudget":
            if not isinstance(available := spec.get("minAvailable"), int):
                yield f"{name}: Kubernetes counts pods of a RayCluster for a whole minAvailable only"
            elif available >= sum(pod["replicas"] for pod in selected):
                yield f"{name} lets no pod go, so that no node can be taken away"
    yield from _volume_problems(manifests, pods)
    yield from _policy_problems(manifests)


def _pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield the pod templates, with the labels that KubeRay adds and the number of pods at least."""
    for manifest in of_kind(manifests, "RayService", "RayCluster"):
        for name, group in groups_of(cluster_of(manifest)).items():
            template = group["template"]
            kind = "head" if name == "head" else "worker"
            added = {"ray.io/node-type": kind, "ray.io/group": "headgroup" if name == "head" else name}
            labels = {**template.get("metadata", {}).get("labels", {}), **group.get("labels", {}), **added}
            replicas = group.get("minReplicas", 1)
            yield {"metadata": {"labels": labels}, "spec": template["spec"], "replicas": replicas}
    for manifest in of_kind(manifests, "StatefulSet", "Job"):
        yield {**manifest["spec"]["template"], "replicas": manifest["spec"].get("replicas", 1)}


def _ports(manifest: Manifest) -> set[str]:
    """Return the ports that an object refers to by name."""
    spec = manifest["spec"]
    if manifest["kind"] == "PodMonitor":
        return {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    rules = spec.get("ingress", []) if manifest["kind"] == "NetworkPolicy" else []
    ports = [entry["port"] for rule in rules for entry in rule.get("ports", [])]
    ports += [entry.get("targetPort") for entry in spec.get("ports", [])]
    return {port for port in ports if isinstance(port, str)}


def _volume_problems(manifests: list[Manifest], pods: list[Manifest]) -> Iterator[str]:
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    made |= {("Secret", name) for name in SECRETS_OF_OPERATORS}
    for volume in (volume for pod in pods for volume in pod["spec"].get("volumes", [])):
        for field, kind, key in (
            ("secret", "Secret", "secretName"),
            ("configMap", "ConfigMap", "name"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if field in volume and (kind, volume[field][key]) not in made:
                yield f"volume {volume['name']}: there is no {kind} {volume[field][key]}"


def _policy_problems(manifests: list[Manifest]) -> Iterator[str]:
    """Yield what a policy closes although Ray needs it."""
    for policy in of_kind(manifests, "NetworkPolicy"):
        if policy["metadata"]["name"] != "paceline":
            continue
        rules = policy["spec"]["ingress"]
        ports = {entry["port"] for rule in rules for entry in rule.get("ports", [])}
        if DASHBOARD_PORT not in ports:
            yield "the operator cannot submit serveConfigV2: the dashboard's port is closed"
        if not any(
            "ports" not in rule and rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}] for rule in rules
        ):
            yield "Ray's pods cannot reach one another on every port"
