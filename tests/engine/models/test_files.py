"""Where models are found: in directories and in a hub cache made here."""

import shutil

import pytest
from huggingface_hub import constants

from engine.config import BUNDLED_DRAFT, ModelConfig
from engine.errors import ModelError
from engine.models.files import model_directory, weight_files
from engine.models.registry import read_config
from engine.models.tokenizer import load_tokenizer


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A model in a hub cache, as `hf download someone/tiny` leaves it there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(BUNDLED_DRAFT, repository / "snapshots" / "abc")
    return repository / "snapshots" / "abc"


def test_a_hub_name_is_found_in_the_local_cache(snapshot):
    config = ModelConfig("someone/tiny")
    assert model_directory(config) == snapshot
    assert weight_files(config) == [snapshot / "model.safetensors"]
    assert read_config(config).to_dict() == read_config(ModelConfig(str(snapshot))).to_dict()
    assert load_tokenizer(config).get_vocab() == load_tokenizer(ModelConfig(str(BUNDLED_DRAFT))).get_vocab()


def test_a_revision_is_found_by_its_name(snapshot):
    shutil.copytree(snapshot, snapshot.with_name("def"))
    (snapshot.parents[1] / "refs" / "v2").write_text("def")
    assert model_directory(ModelConfig("someone/tiny", "v2")) == snapshot.with_name("def")
    with pytest.raises(ModelError, match="does not exist"):
        model_directory(ModelConfig("someone/tiny", "other"))


@pytest.mark.parametrize("path", ["someone/other", "other", "/no/where", "./nowhere", "a/b/c"])
def test_what_is_neither_a_directory_nor_in_the_cache_is_refused_by_name(path, snapshot):
    with pytest.raises(ModelError, match=f"model directory {path} does not exist"):
        model_directory(ModelConfig(path))


def test_missing_weights_are_named(tmp_path):
    shutil.copytree(BUNDLED_DRAFT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"it lacks model\.safetensors"):
        weight_files(ModelConfig(str(tmp_path)))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(ModelError, match=r"it lacks 1\.safetensors"):
        weight_files(ModelConfig(str(tmp_path)))
