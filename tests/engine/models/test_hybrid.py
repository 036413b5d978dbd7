"""What models with linear layers cannot do as drafts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import GroupConfig, suited_to_models
from engine.config import ModelConfig
from engine.drafting.registry import METHODS
from engine.drafting.settle import check_kinds
from engine.errors import ModelError
from engine.models.registry import open_model
from engine.models.source import ModelSource


@pytest.fixture
def hybrid(tmp_path: Path) -> ModelSource:
    return source(tmp_path, "qwen3_next")


def source(folder: Path, model_type: str) -> ModelSource:
    (folder / model_type).mkdir()
    (folder / model_type / "config.json").write_text(json.dumps({"model_type": model_type}))
    return open_model(ModelConfig(str(folder / model_type)))


def test_a_hybrid_draft_drafts_chains_for_any_target(hybrid: ModelSource, tmp_path: Path) -> None:
    target = source(tmp_path, "llama")
    check_kinds(target, hybrid, METHODS["model"])
    check_kinds(hybrid, target, METHODS["tree"])
    for wanted in (target, hybrid):
        with pytest.raises(ModelError, match=r"the draft .*qwen3_next has linear layers, .* must not be one of trees"):
            check_kinds(wanted, hybrid, METHODS["tree"])


def test_a_hybrid_draft_does_not_run_ahead(hybrid: ModelSource, tmp_path: Path) -> None:
    target = source(tmp_path, "llama")
    config = GroupConfig(target.config, hybrid.config)
    assert suited_to_models(config, target, hybrid).run_ahead == "off"
    assert suited_to_models(config, hybrid, target).run_ahead == "auto"
    with pytest.raises(ModelError, match=r"linear layers, .*; run_ahead must be off"):
        suited_to_models(replace(config, run_ahead="on"), target, hybrid)
