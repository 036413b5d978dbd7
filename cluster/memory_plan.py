"""MemoryPlan: collects the surveys of a group's workers, and decides how many KV blocks each of them gets."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence

from engine.config import EngineConfig
from engine.execution.memory import Footprint, Survey, plan_kv_blocks

Located = tuple[str, Survey]
"""A node id, and a survey made on that node."""


class MemoryPlan:
    """Plans once, after all roles have joined and before any of them loads.

    Restarted workers get the same number of blocks, because the engine's block tables outlive the target's ranks.
    """

    def __init__(self, config: EngineConfig, roles: Collection[str]) -> None:
        """Make a plan for these roles, such as `target` and `draft`."""
        self._config = config
        self._missing = set(roles)
        self._surveys: dict[str, Sequence[Located]] = {}
        self._num_blocks: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        if config.num_blocks is not None:
            self._num_blocks.set_result(dict.fromkeys(roles, config.num_blocks))

    @property
    def is_made(self) -> bool:
        """Whether the plan exists, so that workers need not survey their devices."""
        return self._num_blocks.done()

    async def join(self, role: str, surveys: Sequence[Located] = ()) -> int:
        """Wait until every role has joined; return how many KV blocks each worker of this role gets, without block 0.

        Args:
            surveys: one per worker of the role; not needed once the plan is made.

        Raises:
            ModelError: the models do not fit on a device.
        """
        if not self.is_made:
            self._surveys[role] = surveys
            self._missing.discard(role)
            if not self._missing:
                self._num_blocks.set_result(plan_devices(self._surveys, self._config))
        return (await asyncio.shield(self._num_blocks))[role]


def plan_devices(surveys: dict[str, Sequence[Located]], config: EngineConfig) -> dict[str, int]:
    """Return the KV blocks of each role: the fewest that fit on any device of its workers.

    Raises:
        ModelError: the models do not fit on a device.
    """
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
