"""ModelSource: where a model's files are, and what they say."""

import json
import shutil

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import MistralConfig, PreTrainedTokenizerFast

from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET, ModelConfig
from engine.errors import ModelError
from engine.models.registry import open_model
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


ORIGINAL, SCALED = "original_max_position_embeddings", "rope_scaling"
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
GEMMA3 = {"model_type": "gemma3_text"}
GPT2 = {"model_type": "gpt2", "max_position_embeddings": 96}
CONTEXTS = {
    "as it is": (512, {}),
    "Qwen's recipe": (2048, {SCALED: YARN | {ORIGINAL: 512}}),
    "an old recipe, without the original": (2048, {SCALED: {"type": "yarn", "factor": 4.0}}),
    "scaled already": (512, {SCALED: YARN | {ORIGINAL: 128}}),
    "dynamic, where longer texts change others": (512, {SCALED: {"type": "dynamic", "factor": 2.0}}),
    "longrope, likewise": (128, {"model_type": "phi3", "rope_parameters": LONGROPE, ORIGINAL: 128}),
    "llama3": (512, {"rope_parameters": LLAMA3 | {ORIGINAL: 128}}),
    "a window is no limit": (512, {"model_type": "mistral", "sliding_window": 8}),
    "Gemma 3, linear and scaled already": (512, GEMMA3 | {SCALED: {"rope_type": "linear", "factor": 8.0}}),
    "yarn in both": (
        1024,
        GEMMA3 | {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN | {"factor": 2.0}}},
    ),
    "an encoder-decoder, and its start token": (2047, {"model_type": "t5", "decoder_start_token_id": 0}),
    "learned positions": (96, GPT2 | {"rope_parameters": YARN | {ORIGINAL: 96}}),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_is_that_of_the_scaled_positions(name, tmp_path):
    length, settings = CONTEXTS[name]
    source = written(tmp_path, **settings)
    source.check_length(None)
    source.check_length(length)
    problem = f"max_model_len is {length + 1:,}, but {tmp_path} takes {length:,} tokens, by max_position_embeddings"
    with pytest.raises(ModelError, match=problem):
        source.check_length(length + 1)


def test_a_revision_is_found_by_its_name(snapshot):
    shutil.copytree(snapshot, snapshot.with_name("def"))
    (snapshot.parents[1] / "refs" / "v2").write_text("def")
    assert source_of("someone/tiny", "v2").directory == snapshot.with_name("def")
    with pytest.raises(ModelError, match="does not exist"):
        _ = source_of("someone/tiny", "other").directory


@pytest.mark.parametrize("path", ["someone/other", "/no/where", "a/b/c"])
def test_what_is_neither_a_directory_nor_in_the_cache_is_refused_by_name(path, snapshot):
    with pytest.raises(ModelError, match=f"model directory {path} does not exist"):
        _ = source_of(path).configuration


WHOLE, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SHARDS = ("1.safetensors", "2.safetensors")
FILES_LOADED = [
    ((WHOLE, "a.gguf"), {}, [WHOLE]),
    ((INDEX, *SHARDS, "a.gguf"), {}, [*SHARDS]),
    ((INDEX, *SHARDS, WHOLE), {}, [WHOLE]),
    ((WHOLE, "1.safetensors"), {"transformers_weights": "1.safetensors"}, ["1.safetensors"]),
    (("consolidated.safetensors", "a.gguf"), {}, ["a.gguf"]),
    ((), {}, r"it lacks model\.safetensors$"),
    (("model.fp16.safetensors",), {}, r"it lacks model\.safetensors$"),
    ((INDEX, "1.safetensors", BIN), {}, r"it lacks 2\.safetensors"),
    ((BIN, "a.gguf"), {}, r"has its weights in pytorch_model\.bin, which can run code; convert it to safetensors"),
    (("b.gguf", "a.gguf"), {}, r"holds 2 GGUF files, a\.gguf, b\.gguf; name one, as .*/a\.gguf$"),
]


def written(folder, *names, **settings):
    sizes = {} if "text_config" in settings else SIZES
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes} | settings))
    for name in names:
        (folder / name).touch()
    if INDEX in names:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(enumerate(SHARDS))}))
    return source_of(folder)


@pytest.mark.parametrize(("names", "settings", "loaded"), FILES_LOADED)
def test_the_weights_are_those_that_transformers_would_load(names, settings, loaded, tmp_path, caplog):
    source = written(tmp_path, *names, **settings)
    if isinstance(loaded, str):
        with pytest.raises(ModelError, match=loaded):
            _ = source.weight_files
        return
    assert source.weight_files == [tmp_path / name for name in loaded]
    assert ("the former is loaded" in caplog.text) == ({WHOLE, INDEX} <= {*names})


IMAGES = {"model_type": "gemma3", "text_config": SIZES | {"eos_token_id": 2}}
ENDS = [
    ({}, {"eos_token_id": [1, 7]}, "t1", [1, 7]),
    ({}, None, None, [1]),
    ({"eos_token_id": [1, 7]}, None, "t7", [1, 7]),
    ({"eos_token_id": 3}, {"eos_token_id": 2}, None, [2]),
    ({"eos_token_id": None}, None, "t9", [9]),
    ({"eos_token_id": [1, -1, 64]}, None, "t1", [1]),
    (IMAGES | {"eos_token_id": [1, 7]}, None, None, [1, 7]),
    *(({}, {"eos_token_id": wrong}, None, None) for wrong in ("</s>", True, [None])),
]


@pytest.mark.parametrize(("configuration", "generation", "last", "ends"), ENDS)
def test_a_text_ends_as_its_settings_and_its_tokenizer_say(configuration, generation, last, ends, tmp_path, caplog):
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=last).save_pretrained(tmp_path)
    source = written(tmp_path, **configuration)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if ends is None:
        with pytest.raises(ModelError, match=rf"the eos_token_id of {tmp_path} is .*; it must be an id or a list"):
            _ = source.eos_token_ids
        return
    assert source.eos_token_ids == ends
    warned = [record for record in caplog.records if "each of them ends one" in record.message]
    assert [record.levelname for record in warned] == ["WARNING"] * (last == "t9")


def test_a_mistral_whose_layers_differ_is_a_ministral_as_in_transformers(tmp_path):
    MistralConfig(**SIZES, sliding_window=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert source_of(tmp_path).configuration.model_type == "mistral"
    layers = ["full_attention", "sliding_attention"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": layers}))
    assert source_of(tmp_path).configuration.model_type == "ministral"


@pytest.mark.parametrize("name", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_ids_are_those_of_the_file_whatever_class_the_settings_name(name, tmp_path):
    folder = shutil.copytree(BUNDLED_TARGET, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))
    tokenizer = source_of(folder).tokenizer
    assert tokenizer(TEXT)["input_ids"] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.eos_token == "<|endoftext|>"


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
