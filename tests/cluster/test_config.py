"""GroupConfig travels to workers and is never changed on the way."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from cluster.config import GroupConfig
from engine.config import EngineConfig, ModelConfig

CONFIG = GroupConfig(ModelConfig("target"), ModelConfig("draft", device="cpu"), EngineConfig(block_size=8))


def test_a_group_arrives_as_it_was_sent() -> None:
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG


def test_a_group_is_replaced_and_not_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.run_ahead = "on"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        CONFIG.engine.block_size = 4  # type: ignore[misc]
    assert replace(CONFIG, run_ahead="on").engine is CONFIG.engine


def test_a_target_alone_is_a_group_without_a_draft() -> None:
    config = GroupConfig(ModelConfig("target"))
    assert (config.draft, config.tensor_parallel_size, config.engine) == (None, 1, EngineConfig())


def test_a_draft_worker_is_there_for_a_method_that_runs_in_one() -> None:
    assert CONFIG.has_draft_worker
    assert not replace(CONFIG, draft=None).has_draft_worker
    assert not replace(CONFIG, engine=EngineConfig(drafting="none")).has_draft_worker
