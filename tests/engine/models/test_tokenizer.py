"""A model's tokenizer is what its tokenizer.json says, whatever class its settings name."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import BUNDLED_TARGET, ModelConfig
from engine.errors import ModelError, ModelMismatchError
from engine.models.tokenizer import check_same_vocabulary, load_tokenizer

TEXT = "This PEP proposes  to\n\ncafe\u0301 12345 <|user|>x<|endoftext|>"


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_ids_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_TARGET, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))
    tokenizer = load_tokenizer(ModelConfig(str(tmp_path)))
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a tokenizer from"):
        load_tokenizer(ModelConfig(str(tmp_path)))


def test_the_first_id_that_differs_is_named(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_TARGET, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (40, 41))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelMismatchError, match="id 40 "):
        check_same_vocabulary(ModelConfig(str(BUNDLED_TARGET)), ModelConfig(str(tmp_path)))
