"""ModelSource: where a model's files are, what they say, and that each is read once."""

import collections
import json
import shutil
import sys

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, MistralConfig, Phi3Config

from cluster.workers.actors import DraftWorker, TargetWorker
from engine import LLM
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET, EngineConfig, ModelConfig
from engine.errors import ModelError, ModelMismatchError
from engine.execution.memory import CacheSize
from engine.models.registry import open_model
from engine.models.source import check_same_vocabulary
from tests.engine.tiny import SIZES

TEXT = "This PEP proposes  to\n\ncafe\u0301 12345 <|user|>x<|endoftext|>"


def source_of(path, revision=None):
    return open_model(ModelConfig(str(path), revision))


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
    source, local = source_of("someone/tiny"), source_of(snapshot)
    assert source.directory == snapshot
    assert source.weight_files == [snapshot / "model.safetensors"]
    assert source.configuration.to_dict() == local.configuration.to_dict()
    assert source.tokenizer.get_vocab() == local.tokenizer.get_vocab()


def test_with_longrope_no_text_is_so_long_that_those_beside_it_would_change(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = SIZES | {"pad_token_id": 0, "original_max_position_embeddings": 128}
    Phi3Config(**sizes, rope_parameters=rope).save_pretrained(tmp_path)
    source = source_of(tmp_path)
    assert source.configuration.max_position_embeddings == 512
    assert source.kind.context_length(source.configuration) == 128


def test_a_revision_is_found_by_its_name(snapshot):
    shutil.copytree(snapshot, snapshot.with_name("def"))
    (snapshot.parents[1] / "refs" / "v2").write_text("def")
    assert source_of("someone/tiny", "v2").directory == snapshot.with_name("def")
    with pytest.raises(ModelError, match="does not exist"):
        _ = source_of("someone/tiny", "other").directory


@pytest.mark.parametrize("path", ["someone/other", "other", "/no/where", "./nowhere", "a/b/c"])
def test_what_is_neither_a_directory_nor_in_the_cache_is_refused_by_name(path, snapshot):
    with pytest.raises(ModelError, match=f"model directory {path} does not exist"):
        _ = source_of(path).configuration


@pytest.mark.parametrize("content", [None, "[]", "{", '{"model_type": "unheard-of"}', "{}"])
def test_a_directory_without_a_configuration_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"cannot read .*{tmp_path}"):
        _ = source_of(tmp_path).configuration


def test_missing_weights_are_named(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"it lacks model\.safetensors"):
        _ = source_of(tmp_path).weight_files
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    with pytest.raises(ModelError, match=r"it lacks 1\.safetensors"):
        _ = source_of(tmp_path).weight_files


def test_every_end_of_text_id_of_the_generation_settings_counts(tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    assert source_of(tmp_path).eos_token_ids == [1, 7]
    GenerationConfig(do_sample=True).save_pretrained(tmp_path)
    assert source_of(tmp_path).eos_token_ids == [1], "they name no such id, so the configuration's counts"
    (tmp_path / "generation_config.json").unlink()
    assert source_of(tmp_path).eos_token_ids == [1]


def test_a_mistral_whose_layers_differ_is_a_ministral_as_in_transformers(tmp_path):
    MistralConfig(**SIZES, sliding_window=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert source_of(tmp_path).configuration.model_type == "mistral"
    layers = ["full_attention", "sliding_attention"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": layers}))
    assert source_of(tmp_path).configuration.model_type == "ministral"


@pytest.fixture
def target_copy(tmp_path):
    folder = tmp_path / "target"
    return shutil.copytree(BUNDLED_TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_ids_are_those_of_the_file_whatever_class_the_settings_name(name, target_copy):
    settings = target_copy / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))
    tokenizer = source_of(target_copy).tokenizer
    assert tokenizer(TEXT)["input_ids"] == Tokenizer.from_file(str(target_copy / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot read the tokenizer of"):
        _ = source_of(tmp_path).tokenizer


def test_the_first_id_that_differs_is_named(target_copy):
    file = target_copy / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (40, 41))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelMismatchError, match="id 40 "):
        check_same_vocabulary(source_of(BUNDLED_TARGET), source_of(target_copy))


@pytest.fixture(scope="session")
def opened():
    """Counts the JSON files that this process opens; a hook cannot be removed again."""
    counter = collections.Counter()

    def count(event, arguments):
        if event == "open" and str(arguments[0]).endswith(("config.json", "tokenizer.json")):
            counter[str(arguments[0])] += 1

    sys.addaudithook(count)
    return counter


@pytest.fixture
def pair(tmp_path, opened):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in (BUNDLED_TARGET, BUNDLED_DRAFT)]
    opened.clear()
    return [str(folder) for folder in folders]


FILES = ("config.json", "generation_config.json", "tokenizer.json")


def test_a_process_of_its_own_reads_each_file_once(pair, opened):
    target, draft = pair
    llm = LLM(target, draft, compile="off")
    llm._grammars.table_settings()
    files = [f"{path}/{name}" for path in pair for name in FILES]
    # The draft's configuration tells first whether it is a trained head.
    # The tokenizers' files are compared; if they are the same, only the target's is loaded.
    expected = dict.fromkeys(files, 1) | {f"{draft}/config.json": 2, f"{target}/tokenizer.json": 2}
    assert {file: opened[file] for file in files} == expected


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_reads_each_file_once(role, pair, opened):
    target, draft = (ModelConfig(path, device="cpu") for path in pair)
    worker = (TargetWorker if role == "target" else DraftWorker)(EngineConfig(), 1, "text")
    config = target if role == "target" else draft
    worker.survey(config, 1)
    if role == "target":
        worker.load(config, CacheSize(64, 4), None, 1.0)
    else:
        worker.load(config, target, CacheSize(64, 4), run_ahead=False)
    files = [f"{path}/{name}" for path in pair for name in FILES]
    expected = {file: int(file.startswith(config.path) or role == "draft") for file in files}
    # A grammar loads it; a draft compares it with the target's.
    expected |= {file: int(role == "draft") for file in files if file.endswith("tokenizer.json")}
    assert {file: opened[file] for file in files} == expected


def test_the_digest_is_of_settings_and_weights(tmp_path):
    shutil.copytree(BUNDLED_DRAFT, tmp_path / "a")
    digest = source_of(tmp_path / "a").digest
    assert digest == source_of(BUNDLED_DRAFT).digest
    for name, at in (("config.json", None), ("model.safetensors", 0.3), ("model.safetensors", 1)):
        shutil.copytree(BUNDLED_DRAFT, tmp_path / "b", dirs_exist_ok=True)
        path = tmp_path / "b" / name
        if at is None:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))
        else:
            content = bytearray(path.read_bytes())
            content[int(at * len(content)) - 1] ^= 1
            path.write_bytes(content)
        assert source_of(tmp_path / "b").digest != digest
