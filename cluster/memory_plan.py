"""MemoryPlan: decides from surveys of devices and models how many KV blocks each worker of a group gets.

The target does not wait for the draft: if the draft will be on the device of one of the target's ranks, this rank
surveys the draft's model, too, and the plan leaves room for it. A draft on another device surveys that itself.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from engine.execution.memory import Footprint, Survey, plan_kv_blocks

Located = tuple[str, Survey]
"""A node id, and a survey made on that node."""


class MemoryPlan:
    """Plans before any worker that shares a device has loaded, once for each role.

    Restarted workers get the same number of blocks, because the engine's block tables outlive the target's ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._num_blocks: dict[str, int] = {}
        self._has_target = asyncio.Event()
        if config.num_blocks is not None:
            self._num_blocks = {"target": config.num_blocks, "draft": config.num_blocks}
            self._has_target.set()

    def knows(self, role: str) -> bool:
        """Whether the blocks of a role are planned, so that its workers need not survey their devices."""
        return role in self._num_blocks

    def plan_target(self, target: Sequence[Located], draft: Sequence[Located]) -> int:
        """Plan the target from a survey per rank; return how many KV blocks each rank gets, without block 0.

        Args:
            draft: a survey of the draft's model on the device that it shares with a rank; none if it shares none.

        Raises ModelError if the models do not fit on a device.
        """
        if not self.knows("target"):
            self._num_blocks |= plan_devices({"target": target, **({"draft": draft} if draft else {})}, self._config)
            self._has_target.set()
        return self._num_blocks["target"]

    async def plan_draft(self, surveys: Sequence[Located]) -> int:
        """Wait for the target's plan; return how many KV blocks the draft gets, without block 0.

        Its own survey counts if it shares no device with the target. Raises ModelError if the model does not fit.
        """
        await self._has_target.wait()
        if not self.knows("draft"):
            self._num_blocks |= plan_devices({"draft": surveys}, self._config)
        return self._num_blocks["draft"]


def plan_devices(surveys: Mapping[str, Sequence[Located]], config: EngineConfig) -> dict[str, int]:
    """Return the KV blocks of each role: the fewest that fit on any device of its workers; ModelError if none fit."""
    workers: dict[tuple[str, str], list[Footprint]] = defaultdict(list)
    free_bytes: dict[tuple[str, str], int] = {}
    roles: dict[tuple[str, str], set[str]] = defaultdict(set)
    for role, located in surveys.items():
        for node_id, survey in located:
            device = (node_id, survey.device)
            workers[device].append(survey.footprint)
            free_bytes[device] = min(free_bytes.get(device, survey.free_bytes), survey.free_bytes)
            roles[device].add(role)
    fits = {device: plan_kv_blocks(free_bytes[device], workers[device], config, device=device[1]) for device in workers}
    return {role: min(fits[device] for device in fits if role in roles[device]) for role in surveys}
