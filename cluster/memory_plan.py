"""MemoryPlan: decides from surveys of devices and models how large the caches of a group's workers are.

The target does not wait for the draft: if both share a device, the target's rank there surveys the draft's model, too.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.execution.memory import CacheSize, Survey, plan_cache, with_learner

Located = tuple[str, Survey]
"""A node id, and a survey made there."""


class MemoryPlan:
    """Plans the caches of each role once, before any worker that shares the device has loaded.

    Restarted workers get caches of the same size, because the engine's block tables outlive the target's ranks.
    """

    def __init__(self, config: EngineConfig, draft_learning: str = "off") -> None:
        self._config, self._draft_learning = config, draft_learning
        self._sizes: dict[str, CacheSize] = {}
        self._has_target = asyncio.Event()
        if config.num_blocks is not None:
            self._sizes = dict.fromkeys(("target", "draft"), plan_cache(0, [], config, device=""))
            self._has_target.set()

    def knows(self, role: str) -> bool:
        """Whether a role is planned, so that its workers need not survey their devices."""
        return role in self._sizes

    def plan_target(self, target: Sequence[Located], draft: Sequence[Located]) -> CacheSize:
        """Return the size of each rank's cache, from a survey per rank.

        `draft` holds a survey of the draft's model if it shares a rank's device. Raises ModelError if they do not fit.
        """
        if not self.knows("target"):
            length = min(survey.footprint.max_model_len for _, survey in target)
            self._config = replace(self._config, max_model_len=length)  # the draft's may be longer, and is not needed
            drafts = {"draft": self._with_learner(draft)} if draft else {}
            self._sizes |= plan_devices({"target": target, **drafts}, self._config)
            self._has_target.set()
        return self._sizes["target"]

    async def plan_draft(self, surveys: Sequence[Located]) -> CacheSize:
        """Wait for the target's plan, then return the size of the draft's cache.

        The surveys count if the draft shares no device with the target. Raises ModelError if the model does not fit.
        """
        await self._has_target.wait()
        if not self.knows("draft"):
            self._sizes |= plan_devices({"draft": self._with_learner(surveys)}, self._config)
        return self._sizes["draft"]

    def _with_learner(self, draft: Sequence[Located]) -> list[Located]:
        learning = self._draft_learning
        return [(node, replace(s, footprint=with_learner(s.footprint, learning))) for node, s in draft]


def plan_devices(surveys: Mapping[str, Sequence[Located]], config: EngineConfig) -> dict[str, CacheSize]:
    """Return the size of each role's cache, the smallest over its devices; raise ModelError if none fits."""
    devices: dict[tuple[str, str], list[Survey]] = defaultdict(list)
    for node_id, survey in itertools.chain(*surveys.values()):
        devices[node_id, survey.device].append(survey)
    fits = {}
    for device, device_surveys in devices.items():
        num_free = min(survey.free_bytes for survey in device_surveys)
        footprints = [survey.footprint for survey in device_surveys]
        fits[device] = plan_cache(num_free, footprints, config, device=device[1])
    sizes = {role: [fits[node_id, survey.device] for node_id, survey in located] for role, located in surveys.items()}
    return {role: CacheSize(*map(min, zip(*fitting, strict=True))) for role, fitting in sizes.items()}
