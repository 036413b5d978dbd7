"""A group's configuration: whole before anything starts."""

from dataclasses import FrozenInstanceError, fields

import pytest

from cluster.config import GroupConfig
from engine.config import EngineConfig, ModelConfig


def test_a_target_is_enough_and_decodes_plainly():
    config = GroupConfig(target=ModelConfig("target"))
    assert config.draft is None
    assert config.engine == EngineConfig()
    assert config.tensor_parallel_size == 1


def test_no_group_changes_the_configuration_of_another():
    config = GroupConfig(target=ModelConfig("target"))
    for field in fields(GroupConfig):
        with pytest.raises(FrozenInstanceError):
            setattr(config, field.name, None)
    hash(config)


def test_a_round_waits_for_its_draft_less_than_for_its_target_and_for_that_less_than_for_a_start():
    config = GroupConfig(target=ModelConfig("target"))
    assert config.draft_timeout_s < config.verify_timeout_s < config.start_timeout_s
