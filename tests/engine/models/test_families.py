"""Families: what is refused says why, and the table in deployments/docs/families.md is right."""

import json

import pytest
import transformers
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.families import REFUSED
from engine.models.registry import open_model
from tests.families import PAGE, listed, table, vllm_table

REASONS = {
    "bart": "an encoder-decoder of a family that is not served",
    "bert": "an encoder, whose tokens attend to later ones",
    "bloom": "whose attention cannot be replaced",
    "clip_vision_model": "which has no causal language model in transformers",
    "deepseek_v3": None,
    "deepseek_v4": "which attend to summaries of tokens",
    "doge": "whose layers make masks of their own",
    "gemma4_unified": None,
    "gemma4_unified_assistant": "a draft that reads its target's keys and values",
    "hy_v4": "layers",
    "granitemoehybrid": None,
    "llava": None,
    "mamba2": "whose layers keep a state that cannot be rolled back",
    "paligemma": "use_bidirectional_attention",
    "qwen2_5_vl": "whose text part has no causal language model of its own",
    "siglip": "but one for image classification",
    "timm_wrapper": "requires the timm library",
    "unheard-of": "has no model_type 'unheard-of'; the code of a repository (auto_map) is never run",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_model_is_served_or_refused_by_a_sentence(name, tmp_path):
    if name != "unheard-of" and name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "auto_map": {}}))
    source = open_model(ModelConfig(str(tmp_path)))
    if (reason := REASONS[name]) is None:
        assert source.configuration.get_text_config() is source.configuration
        return
    with pytest.raises(ModelError) as refusal:
        _ = source.configuration
    assert reason in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.filterwarnings("ignore")
def test_the_table_names_what_vllm_serves():
    """`python -m tests.families vllm` mends it."""
    pytest.importorskip("vllm", reason="vLLM's registry is in .venv-vllm: `make vllm`")
    assert vllm_table() in PAGE.read_text()


@pytest.mark.slow
def test_the_table_names_every_architecture_of_transformers():
    """`python -m tests.families` mends it. With other versions it only shows that no name ends in a traceback."""
    written, names = listed()
    is_same_version = transformers.__version__ in written
    generated = table(with_marks=is_same_version)
    assert len(names) > 90
    assert generated == written or not is_same_version


def test_names_that_are_refused_are_names_of_transformers():
    if transformers.__version__ in listed()[0]:
        assert REFUSED.keys() <= {*AutoModelForCausalLM._model_mapping._model_mapping, "gemma4_assistant"}
