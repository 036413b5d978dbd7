"""GroupConfig travels to workers and is never changed on the way."""

from dataclasses import replace

import pytest

from cluster.config import GroupConfig, suited_to_models
from engine.config import EngineConfig, ModelConfig
from engine.drafting.registry import method_of
from engine.errors import ModelError
from engine.models.registry import open_model
from tests.engine.heads.files import head_settings, save_head

CONFIG = GroupConfig(ModelConfig("target"), ModelConfig("draft", device="cpu"), EngineConfig(block_size=8))


def test_a_draft_never_runs_ahead_of_an_encoder_decoder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    model = ModelConfig(str(tmp_path))
    source = open_model(model)
    config = GroupConfig(model, model)
    assert suited_to_models(config, source, source) == replace(config, run_ahead="off")
    with pytest.raises(ModelError, match="is an encoder-decoder, whose draft cannot run ahead; run_ahead must be off"):
        suited_to_models(replace(config, run_ahead="on"), source, source)


def test_a_head_that_drafts_blocks_never_runs_ahead(tmp_path):
    head = save_head(tmp_path / "head", head_settings("target") | {"speculators_model_type": "dflash"}, {})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = ModelConfig(str(tmp_path), head=head)
    source, engine = open_model(model), EngineConfig(drafting="head_worker")
    config = GroupConfig(model, replace(model, head_only=True), engine)
    assert suited_to_models(config, source, source) == replace(config, run_ahead="off")
    with pytest.raises(ModelError, match="run_ahead is on, but the head drafts blocks, which need the verdict"):
        suited_to_models(replace(config, run_ahead="on"), source, source)


@pytest.mark.parametrize(
    ("drafting", "run_ahead", "expected"),
    [
        ("model", "on", ("none", "ahead", "alternate")),
        ("model+suffix", "off", ("none", "alternate")),
        ("tree", "off", ("none", "alternate")),
        ("head_worker", "on", ("none", "ahead")),
        ("suffix", "off", ()),
        ("head", "off", ()),
    ],
)
def test_batches_alternate_where_a_draft_worker_needs_nothing_of_the_target(drafting, run_ahead, expected):
    draft = CONFIG.draft if method_of(drafting).runs_in == "draft" else None
    config = replace(CONFIG, engine=EngineConfig(drafting=drafting), draft=draft, run_ahead=run_ahead)
    assert config.overlaps == expected


def test_a_decoder_only_target_is_left_as_it_is_with_a_draft_or_none(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = ModelConfig(str(tmp_path))
    source, config = open_model(model), GroupConfig(model, model, run_ahead="on")
    assert all(suited_to_models(config, source, draft) is config for draft in (source, None))
