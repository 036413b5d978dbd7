"""GroupConfig travels to workers and is never changed on the way."""

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from cluster.config import GroupConfig, suited_to_models
from engine.config import EngineConfig, ModelConfig
from engine.errors import ModelError

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


def test_a_draft_never_runs_ahead_of_an_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    model = ModelConfig(str(tmp_path))
    config = GroupConfig(model, model)
    assert suited_to_models(config) == replace(config, run_ahead="off")
    with pytest.raises(ModelError, match=r"run_ahead is on, but .* is an encoder-decoder"):
        suited_to_models(replace(config, run_ahead="on"))


def test_a_decoder_only_pair_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = ModelConfig(str(tmp_path))
    config = GroupConfig(model, model, run_ahead="on")
    assert suited_to_models(config) is config
