"""The private parts of Ray Core that this repository uses, and the Ray version they were checked with.

An upgrade of Ray is a review of this file and of `deployments/ray_internals.py`, which has Serve's part.
"""

import logging

from ray._common.filters import CoreContextFilter
from ray._common.formatters import JSONFormatter
from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia
from ray._private.state import available_resources_per_node
from ray._private.utils import get_num_cpus
from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

from cluster.config import LogFormat

__all__ = [
    "CHECKED_RAY",
    "available_resources_per_node",
    "node_labels_match_selector",
    "stderr_handler",
    "this_machine",
]

CHECKED_RAY = "2.60"


def this_machine() -> tuple[dict[str, float], dict[str, str]]:
    """Return the resources and labels that this machine has when Ray starts on it, without torch's slow import."""
    present, visible = Nvidia.get_current_node_num_accelerators(), Nvidia.get_current_process_visible_accelerator_ids()
    resources = {"CPU": get_num_cpus(), "GPU": float(present if visible is None else min(present, len(visible)))}
    accelerator_type = Nvidia.get_current_node_accelerator_type() if resources["GPU"] else None
    return resources, {} if accelerator_type is None else {"ray.io/accelerator-type": accelerator_type}


def stderr_handler(log_format: LogFormat) -> logging.Handler:
    """Return a handler of stderr, which Ray shows: lines of text, or JSON objects with the fields of Ray and Serve."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JSONFormatter())
        handler.addFilter(CoreContextFilter())  # ids of job, node, worker and actor
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s -- %(message)s"))
    return handler
