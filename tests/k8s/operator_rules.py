"""What KubeRay refuses, or gets wrong, although its schemas allow it."""

import re
from collections.abc import Iterator

from ray import __version__ as ray_version

from tests.k8s.manifests import Manifest, cluster_of, groups_of, ray_container

MAX_NAME = {"RayService": 47, "RayCluster": 63}
"""KubeRay adds suffixes to the names of services."""
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCE_PARAMS = {"num-cpus", "num-gpus", "memory", "resources"}
_REDIS_VARIABLES = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}


def operator_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what KubeRay would refuse in a RayService or RayCluster."""
    name = manifest["metadata"]["name"]
    if len(name) > MAX_NAME[manifest["kind"]] or not _DNS_1035.fullmatch(name):
        yield f"{manifest['kind']} has the invalid name {name}"
    cluster = cluster_of(manifest)
    if cluster.get("rayVersion") != ray_version:
        yield f"rayVersion is {cluster.get('rayVersion')}, but the image has {ray_version}"
    for group_name, group in groups_of(cluster).items():
        yield from (f"group {group_name}: {problem}" for problem in _group_problems(group, group_name, cluster))
    if manifest["kind"] == "RayService":
        yield from _upgrade_problems(manifest)
        if "upgradeStrategy" in cluster:
            yield "rayClusterConfig.upgradeStrategy cannot be set under a RayService"
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not token, so anybody who reaches the dashboard can run code"


def _group_problems(group: Manifest, name: str, cluster: Manifest) -> Iterator[str]:
    params = group.get("rayStartParams")
    if params is None:
        yield "rayStartParams is not set, and KubeRay writes into it"
        params = {}
    if group.get("resources") and (both := _RESOURCE_PARAMS & params.keys()):
        yield f"resources and rayStartParams both set {sorted(both)}"
    if "labels" in params:
        yield "labels belong into the group's labels, not into rayStartParams"
    if name == "head":
        if params.get("num-cpus") != "0":
            yield "the head has CPUs for replicas"
    elif not 0 <= group.get("minReplicas", 0) <= group.get("maxReplicas", 0):
        yield f"minReplicas {group.get('minReplicas')} and maxReplicas {group.get('maxReplicas')} contradict each other"
    variables = {variable["name"] for variable in ray_container(group).get("env", [])}
    if cluster.get("gcsFaultToleranceOptions") and (both := _REDIS_VARIABLES & variables):
        yield f"gcsFaultToleranceOptions and the environment both set {sorted(both)}"
    policy = group["template"]["spec"].get("restartPolicy", "Never")
    if cluster.get("autoscalerOptions", {}).get("version") == "v2" and policy != "Never":
        yield f"autoscaler v2 cannot have restartPolicy {policy}"


def _upgrade_problems(service: Manifest) -> Iterator[str]:
    strategy = service["spec"].get("upgradeStrategy", {})
    kinds = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
    if (kind := strategy.get("type")) not in kinds:
        yield f"upgradeStrategy.type is {kind}, not one of {kinds}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs the autoscaler"
    options = strategy.get("clusterUpgradeOptions", {})
    if not 0 < options.get("stepSizePercent", 0) <= options.get("maxSurgePercent", 100) <= 100:
        yield "stepSizePercent is not between 0 and maxSurgePercent"
    if options.get("intervalSeconds", 0) <= 0 or not options.get("gatewayClassName"):
        yield "an incremental upgrade needs intervalSeconds and gatewayClassName"
