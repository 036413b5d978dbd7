"""What a pod of ours must have: hardening, volumes that exist, time to drain, probes for KubeRay's Service."""

from collections.abc import Iterator

from deployments.config import AppConfig
from tests.k8s.manifests import Manifest, cluster_of, groups_of, ray_container

DRAIN_MARGIN_S = 60
"""What a pod may take beyond its streams: Serve's own shutdown and Ray's."""
SERVE_PORT, METRICS_PORT = 8000, 8080


def pod_problems(manifest: Manifest, config: AppConfig) -> Iterator[str]:
    """Yield what is wrong with the pods of a RayService or RayCluster that serves `config`."""
    cluster = cluster_of(manifest)
    images = {ray_container(group)["image"] for group in groups_of(cluster).values()}
    if len(images) > 1 or ":" not in next(iter(images)):
        yield f"all pods must run one image with a tag, not {sorted(images)}"
    if config.pair.execution == "vllm" and not all(image.endswith("-vllm") for image in images):
        yield f"there is no vLLM in {sorted(images)}"
    drain_s = max(config.drain_timeout_s, config.limits.request_timeout_s)
    for name, group in groups_of(cluster).items():
        yield from (f"group {name}: {problem}" for problem in _problems(group))
        if name != "head" and manifest["kind"] == "RayService":
            yield from (f"group {name}: {problem}" for problem in _serving_problems(group, drain_s))
    if manifest["kind"] == "RayService" and manifest["spec"].get("rayClusterDeletionDelaySeconds", 60) <= drain_s:
        yield f"the old cluster is deleted before its streams of up to {drain_s:g} s have finished"
    if _problems_of_container(cluster.get("autoscalerOptions", {}), {"tmp"}) and cluster.get("enableInTreeAutoscaling"):
        yield "the autoscaler's container is not hardened like the others"


def _problems(group: Manifest) -> Iterator[str]:
    pod, container = group["template"]["spec"], ray_container(group)
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    yield from _problems_of_container(container, set(volumes))
    if not pod.get("securityContext", {}).get("runAsNonRoot"):
        yield "it may run as root"
    if unmounted := volumes.keys() - {mount["name"] for mount in container.get("volumeMounts", [])}:
        yield f"nothing mounts the volumes {sorted(unmounted)}"
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    if ports.get("serve") != SERVE_PORT or ports.get("metrics") != METRICS_PORT:
        yield f"its ports are {ports}, but Serve listens on {SERVE_PORT} and Ray's exporter on {METRICS_PORT}"
    resources = container["resources"]
    for resource in {"memory", "nvidia.com/gpu"} & (resources["limits"].keys() | resources["requests"].keys()):
        if resources["limits"].get(resource) != resources["requests"].get(resource):
            yield f"it may be evicted or fail to start: request and limit of {resource} differ"


def _problems_of_container(container: Manifest, volumes: set[str]) -> list[str]:
    problems = []
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
        problems.append("it may gain privileges")
    if context.get("readOnlyRootFilesystem") is not True:
        problems.append("its root is writable")
    mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
    if unknown := mounts.keys() - volumes:
        problems.append(f"it mounts the volumes {sorted(unknown)}, which do not exist")
    if mounts.get("tmp") != "/tmp":
        problems.append("it cannot write to /tmp")
    return problems


def _serving_problems(group: Manifest, drain_s: float) -> Iterator[str]:
    pod, container = group["template"]["spec"], ray_container(group)
    grace_s = pod.get("terminationGracePeriodSeconds", 30)
    if grace_s < drain_s + DRAIN_MARGIN_S:
        yield f"it has {grace_s} s to end, but its streams may take {drain_s:g} s"
    if "preStop" not in container.get("lifecycle", {}):
        yield "its streams are cut when it ends"
    # KubeRay's Service sends requests to every worker that is ready, so only what passes through a proxy may say so.
    if "readinessProbe" in container:
        probe = container["readinessProbe"].get("httpGet", {})
        if probe.get("path") != "/ready" or probe.get("port") not in ("serve", SERVE_PORT):
            yield "it can be ready without a proxy, and then gets requests that nothing answers"
