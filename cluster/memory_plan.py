"""MemoryPlan: decides from surveys of devices and models how large the caches of a group's workers are.

The target does not wait for the draft: if the draft will be on the device of one of the target's ranks, this rank
surveys the draft's model, too, and the plan leaves room for it. A draft on another device surveys that itself.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.execution.memory import CacheSize, Footprint, Survey, plan_cache

Located = tuple[str, Survey]
"""A node id, and a survey made on that node."""


class MemoryPlan:
    """Plans before any worker that shares a device has loaded, once for each role.

    Restarted workers get as many as before, because the engine's block tables outlive the target's ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._sizes: dict[str, CacheSize] = {}
        self._has_target = asyncio.Event()
        if config.num_blocks is not None:
            self._sizes = dict.fromkeys(("target", "draft"), plan_cache(0, [], config, device=""))
            self._has_target.set()

    def knows(self, role: str) -> bool:
        """Whether the caches of a role are planned, so that its workers need not survey their devices."""
        return role in self._sizes

    def plan_target(self, target: Sequence[Located], draft: Sequence[Located]) -> CacheSize:
        """Plan the target from a survey per rank; return the size of each rank's cache.

        Args:
            draft: a survey of the draft's model on the device that it shares with a rank; none if it shares none.

        Raises ModelError if the models do not fit on a device.
        """
        if not self.knows("target"):
            length = min(survey.footprint.max_model_len for _, survey in target)
            self._config = replace(self._config, max_model_len=length)  # the draft's may be longer, and is not needed
            self._sizes |= plan_devices({"target": target, **({"draft": draft} if draft else {})}, self._config)
            self._has_target.set()
        return self._sizes["target"]

    async def plan_draft(self, surveys: Sequence[Located]) -> CacheSize:
        """Wait for the target's plan; return the size of the draft's cache.

        Its own survey counts if it shares no device with the target. Raises ModelError if the model does not fit.
        """
        await self._has_target.wait()
        if not self.knows("draft"):
            self._sizes |= plan_devices({"draft": surveys}, self._config)
        return self._sizes["draft"]


def plan_devices(surveys: Mapping[str, Sequence[Located]], config: EngineConfig) -> dict[str, CacheSize]:
    """Return the cache of each role: the smallest that fits on any device of its workers; ModelError if none fits."""
    workers: dict[tuple[str, str], list[Footprint]] = defaultdict(list)
    free_bytes: dict[tuple[str, str], int] = {}
    roles: dict[tuple[str, str], set[str]] = defaultdict(set)
    for role, located in surveys.items():
        for node_id, survey in located:
            device = (node_id, survey.device)
            workers[device].append(survey.footprint)
            free_bytes[device] = min(free_bytes.get(device, survey.free_bytes), survey.free_bytes)
            roles[device].add(role)
    fits = {device: plan_cache(free_bytes[device], workers[device], config, device=device[1]) for device in workers}
    sizes = {role: [fits[device] for device in fits if role in roles[device]] for role in surveys}
    return {role: CacheSize(*map(min, zip(*fitting, strict=True))) for role, fitting in sizes.items()}
