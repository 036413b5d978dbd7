"""SpeedUp: how much faster drafts can make a target on given GPUs, by the roofline, before anything is loaded.

A round commits `1 + a + ... + a^k` tokens of each request, where `a` is the share of draft tokens that the target
accepts. It takes `t_d(k) + t_v(k)` where draft and target wait for each other. A draft that runs ahead guesses the
token after its draft, too, so it needs `max(t_v(k), t_d(k + 1))` if the verdict was among its guesses.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, shares_gpu
from cluster.ray_core import node_labels_match_selector
from engine.errors import ConfigError
from engine.execution.roofline import Placed, decoding, placed
from engine.models.source import ModelSource

logger = logging.getLogger(__name__)

ACCELERATOR = "ray.io/accelerator-type"
"""The label of a node with the type of its GPUs."""
CONTEXT = 1000
"""Tokens of a request while it is judged."""
BATCH_SIZES = (1, 8)
LIKELY_ACCEPTANCE = 0.8
"""Of a good draft of the target's family; see `tests/bench/README.md`."""
HIT_RATE = 0.9
"""Of one request's verdicts, the share that a draft that runs ahead has prepared for; measured: 0.84 to 0.95."""
_SURE = 0.8
"""A speed-up that is at most this even if all tokens are accepted is refused: a roofline is not that wrong."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft, and the times of their passes, in seconds."""

    target: Placed
    draft: Placed

    def target_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of a pass over rows with `k` draft tokens each."""
        return self.target.pass_seconds(decoding(round(num_rows), k + 1, round(context)))

    def draft_s(self, num_rows: float, k: int, context: float = CONTEXT) -> float:
        """Return the time of the `k` passes that make a draft for each row."""
        return k * self.draft.pass_seconds(decoding(round(num_rows), 1, round(context)))

    def round_s(self, num_rows: int, k: int, *, hit_rate: float = 0.0, together: float = 1.0) -> float:
        """Return the time of a round.

        Args:
            hit_rate: of one row's verdicts, the share that a draft that runs ahead has prepared for; 0 if it does not.
            together: groups whose rows are in each pass of the draft.
        """
        target_s, rows = self.target_s(num_rows, k), num_rows * together
        in_turn_s, hits = target_s + self.draft_s(rows, k), hit_rate**num_rows  # of all rows
        return hits * max(target_s, self.draft_s(rows, k + 1)) + (1 - hits) * in_turn_s

    def speed_up(self, num_rows: int, acceptance: float, lengths: Iterable[int], hit_rate: float) -> float:
        """Return the tokens per second with the best of these lengths, ahead or not, over those without drafts."""
        speeds = (
            sum(acceptance**i for i in range(k + 1)) / self.round_s(num_rows, k, hit_rate=rate)  # Leviathan et al., (1)
            for k in lengths
            for rate in (0.0, hit_rate)
        )
        return self.target_s(num_rows, 0) * max(speeds)


def judge(
    config: GroupConfig,
    target: ModelSource,
    draft: ModelSource,
    target_gpu: str,
    draft_gpu: str,
    *,
    is_apart: bool,
    num_added: int,
) -> str:
    """Return why a draft will hardly pay; empty if it may, or if a GPU or a model is unknown, as CPUs are.

    Args:
        target_gpu, draft_gpu: as Ray names them.
        is_apart: whether the draft is on another GPU than the target.
        num_added: GPUs that the group has for its draft alone; 0 also where a pool drafts for an unknown number.

    Raises:
        ConfigError: it cannot pay, even if the target accepts every draft token.
        ModelError: there is no such model.
    """
    size, k = config.tensor_parallel_size, config.engine.num_speculative_tokens
    if config.method.reads_features:  # a head is no model by itself
        return ""
    placed_target, placed_draft = placed(target, target_gpu, size), placed(draft, draft_gpu)
    if placed_target is None or placed_draft is None:
        return ""
    pair = Pair(placed_target, placed_draft)
    lengths = range(1, k + 1) if config.engine.speculation == "adaptive" else [k]
    is_ahead = is_apart and config.run_ahead != "off"
    target_ms, draft_ms = 1e3 * pair.target_s(1, k), 1e3 * pair.draft_s(1, k)
    times = (
        f"by the datasheets, {k} draft tokens of {draft.path} take {draft_ms:.1f} ms on {draft_gpu}, and a pass of "
        f"{target.path} {target_ms:.1f} ms on {size} x {target_gpu}"
    )
    bound = max(pair.speed_up(rows, 1.0, lengths, float(is_ahead)) for rows in BATCH_SIZES)
    if bound < _SURE:
        raise ConfigError(
            f"draft_model cannot pay: {times}; text would come {bound:.2f} times as fast if every draft token were "
            "accepted; use a smaller draft, a faster GPU for it, or draft_model=none"
        )
    likely = [pair.speed_up(rows, LIKELY_ACCEPTANCE, lengths, HIT_RATE * is_ahead) for rows in BATCH_SIZES]
    num_gpus = 1 + num_added / size
    if min(likely) >= num_gpus:
        return ""
    speeds = ", ".join(f"{speed:.2f} with {rows}" for rows, speed in zip(BATCH_SIZES, likely, strict=True))
    return (
        f"the draft will hardly pay: {times}; at {LIKELY_ACCEPTANCE:.0%} acceptance text comes at best {speeds} "
        f"requests times as fast, for {num_gpus:.2f} times the GPUs"
    )


def check_placed(config: GroupConfig, placement: PlacementGroup, target: ModelSource, draft: ModelSource) -> None:
    """Judge a group whose bundles have their nodes: log a warning, or raise as `judge` does."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    nodes, bundles = placement_group_table(placement)["bundles_to_node_id"], placement.bundle_specs

    def gpu(bundle: int) -> str:
        return labels.get(nodes[bundle], {}).get(ACCELERATOR, "") if bundles[bundle].get("GPU") else ""

    is_apart, has_own = not shares_gpu(config, bundles), len(bundles) > DRAFT_BUNDLE + 1
    draft_gpu = gpu(DRAFT_BUNDLE)
    if is_apart and not has_own:  # a pool's, wherever its nodes may be
        selector = dict(config.draft_label_selector)
        nodes_of_pool = [node for node in labels.values() if node_labels_match_selector(node, selector)]
        types = {node.get(ACCELERATOR, "") for node in nodes_of_pool} - {""}
        draft_gpu = types.pop() if len(types) == 1 else ""
    gpus = gpu(len(bundles) - 1), draft_gpu
    if warning := judge(config, target, draft, *gpus, is_apart=is_apart, num_added=int(has_own)):
        logger.warning(warning)
