"""The kind of a model by its configuration: where its text starts, and what it cannot do."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import BartConfig, GenerationConfig, LlamaConfig, T5Config

from cluster.config import GroupConfig, suited_to_models
from engine.config import ModelConfig
from engine.drafting.registry import METHODS
from engine.drafting.settle import check_kinds
from engine.encoder_decoder.model_kind import EncoderDecoder
from engine.errors import ModelError
from engine.models.registry import open_model, refused_fields
from tests.engine.tiny import SIZES, T5_SIZES
from tests.fakes import MarkovModel


def source_of(config, path, **settings):
    config.save_pretrained(path)
    return open_model(ModelConfig(str(path), **settings))


def start_id(source):
    return source.kind.start_id(source.settings, source.generation_settings)


def test_the_start_of_an_encoder_decoders_text_is_that_of_its_generation_settings(tmp_path):
    source = source_of(T5Config(**T5_SIZES), tmp_path / "t5")
    assert isinstance(source.kind, EncoderDecoder)
    assert start_id(source) == 0
    GenerationConfig(decoder_start_token_id=7).save_pretrained(tmp_path / "t5")
    assert start_id(open_model(source.config)) == 7
    assert source.kind.context_length(source.configuration) == 2048
    decoder_only = source_of(LlamaConfig(**SIZES), tmp_path)
    assert start_id(decoder_only) is None
    assert decoder_only.kind.context_length(decoder_only.configuration) == 512


def test_an_encoder_decoder_of_another_family_or_without_a_start_or_quantised_is_refused(tmp_path):
    for config, settings, message in (
        (BartConfig(decoder_start_token_id=2), {}, "bart, an encoder-decoder of a family that is not served"),
        (T5Config(**{**T5_SIZES, "decoder_start_token_id": None}), {}, "names no decoder_start_token_id"),
        (T5Config(**T5_SIZES), {"quantization": "int8"}, "not served quantised"),
    ):
        with pytest.raises(ModelError, match=message):
            _ = source_of(config, tmp_path, **settings).configuration


def test_only_a_model_whose_text_begins_anew_refuses_fields_of_requests():
    info = MarkovModel(torch.eye(3)).info
    assert not refused_fields(info)
    assert {"echo", "prompt_logprobs"} <= refused_fields(replace(info, start_id=0)).keys()


def test_a_hybrid_draft_drafts_chains_for_any_target_and_does_not_run_ahead(tmp_path):
    sources = []
    for name in ("llama", "qwen3_next"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        sources.append(open_model(ModelConfig(str(tmp_path / name))))
    target, hybrid = sources
    check_kinds(target, hybrid, METHODS["model"])
    check_kinds(hybrid, target, METHODS["tree"])
    for wanted in (target, hybrid):
        with pytest.raises(ModelError, match=r"the draft .*qwen3_next has linear layers, .* must not be one of trees"):
            check_kinds(wanted, hybrid, METHODS["tree"])
    config = GroupConfig(target.config, hybrid.config)
    assert suited_to_models(config, target, hybrid).run_ahead == "off"
    assert suited_to_models(config, hybrid, target).run_ahead == "auto"
    with pytest.raises(ModelError, match=r"linear layers, .*; run_ahead must be off"):
        suited_to_models(replace(config, run_ahead="on"), target, hybrid)
