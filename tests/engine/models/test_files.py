"""Damaged model directories: each is refused by one sentence that names the file, before memory is allocated for it."""

import copy
import json
import random
import resource
import shutil

import numpy as np
import pytest
from gguf import GGUFWriter

from engine import LLM, SamplingParams
from engine.config import BUNDLED_DRAFT, BUNDLED_HEAD, BUNDLED_TARGET, ModelConfig
from engine.drafting.assembly import check_files
from engine.errors import ModelError, PacelineError
from engine.models.registry import open_model

VALUES = [0, -1, 10**9, 2**40, 1.5, float("nan"), True, None, "x", [], [1], [[None]], {}, {"a": 1}]
TENSOR = "model.norm.weight"


def outcome(folder, role="target"):
    """The sentence that refuses a directory as a target, draft or head; empty if it serves."""
    target, draft = (folder, "none") if role == "target" else (BUNDLED_TARGET, folder)
    try:
        llm = LLM(target, draft, compile="off", num_blocks=16, max_model_len=64)
        llm.generate("This PEP", SamplingParams(max_tokens=2), show_progress=False)
    except PacelineError as error:
        sentence = str(error)
        assert "\n" not in sentence
        return sentence
    return ""


def edited(settings, seed):
    """The settings with one field removed, or another value in its place."""
    chance, changed = random.Random(seed), copy.deepcopy(settings)
    section = changed
    while isinstance(section[name := chance.choice(list(section))], dict) and section[name] and chance.random() < 0.7:
        section = section[name]
    if chance.random() < 0.1:
        del section[name]
    else:
        section[name] = chance.choice(VALUES)
    return changed


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(BUNDLED_TARGET, tmp_path / "model")


FILES = sorted(path.name for path in BUNDLED_TARGET.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_garbled_or_a_folder_is_refused_by_its_name_or_makes_no_difference(name, model):
    path, content = model / name, (BUNDLED_TARGET / name).read_bytes()
    garbled = bytearray(content)
    for place in range(0, len(content), len(content) // 40):
        garbled[place] ^= 0x15
    versions = [content[:size] for size in (0, 1, len(content) // 2, len(content) - 1)] + [bytes(garbled)]
    sentences = []
    for version in versions:
        path.write_bytes(version)
        sentences.append(outcome(model))
    path.unlink()
    path.mkdir()
    sentences.append(outcome(model))
    are_refused = {"chat_template.jinja": [False, False, True], "training.json": [False] * 3}.get(name, [True] * 3)
    assert [name in sentence for sentence in sentences[:3]] == are_refused
    assert all(name in sentence or not sentence for sentence in sentences)


def configurations(folder, number):
    settings = json.loads((folder / "config.json").read_text())
    return [edited(settings, seed) for seed in range(number)]


@pytest.mark.parametrize(
    ("role", "original", "number"),
    [
        ("target", BUNDLED_TARGET, 80),
        ("draft", BUNDLED_DRAFT, 10),
        ("head", BUNDLED_HEAD, 10),
        pytest.param("target", BUNDLED_TARGET, 200, marks=pytest.mark.long, id="all"),
        pytest.param("head", BUNDLED_HEAD, 100, marks=pytest.mark.long, id="all of a head"),
    ],
)
def test_a_config_json_with_any_value_anywhere_is_refused_in_a_sentence_or_served(role, original, number, tmp_path):
    folder = shutil.copytree(original, tmp_path / "model")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentences = []
    for settings in configurations(original, number):
        (folder / "config.json").write_text(json.dumps(settings))
        sentences.append(outcome(folder, role))
    assert 0 < sum(map(bool, sentences)) < number
    assert all(str(folder) in sentence or "draft_model" in sentence for sentence in filter(None, sentences))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": 0}, "config.json: num_attention_heads is 0; it must be at least 1"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1; it must be at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 16384"),
        ({"text_config": {"n_layer": 0}}, "n_layer is 0"),
        ({"text_config": []}, "text_config is []; it must be an object"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; it must be a text"),
        ({"quantization_config": "int8"}, "quantization_config is 'int8'; it must be an object"),
        ({"vocab_size": 10**9}, "model.embed_tokens.weight is [4096, 192] of floats, and its config.json gives"),
        ({"num_hidden_layers": 13}, "lacks the weights model.layers.12.input_layernorm.weight"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor is '4'; it must be a number above 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": float("nan")}}, "factor is nan"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": float("inf")}}, "factor is inf"),
        ({"hidden_act": "sighs"}, "KeyError"),
        ({"eos_token_id": [0, "</s>"]}, "eos_token_id"),
    ],
)
def test_settings_that_no_model_can_have_are_named_with_their_value(changes, sentence, model):
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(ModelError) as error:
        check_files(open_model(ModelConfig(str(model))), None, 1)
    assert sentence in str(error.value)
    assert str(model) in str(error.value)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ('{"weight_map": {"a": ', "model.safetensors.index.json: Expecting value"),
        ("{}", "lacks the weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "lacks the weight_map"),
        *((json.dumps({"weight_map": {"a": name}}), "must be safetensors files beside it")
          for name in ("../b.safetensors", "/etc/b.safetensors", "c/b.safetensors", "..\\b.safetensors", "..", "", 5)),
    ],
)  # fmt: skip
def test_an_index_names_files_beside_it(index, sentence, model):
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text(index)
    assert sentence in outcome(model)


HEADERS = {
    "a shape larger than its bytes": {"shape": [193]},
    "bytes after the end": {"data_offsets": [2**40, 2**40 + 384]},
    "integers": {"dtype": "I16"},
    "another number format, and shape": {"dtype": "F32", "shape": [96]},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_about_a_tensor_is_refused(name, model):
    path = model / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[TENSOR] |= HEADERS[name]
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    assert str(model) in outcome(model)


def test_a_gguf_file_of_impossible_counts_or_too_few_weights_is_refused(model):
    (model / "model.safetensors").unlink()
    path = model / "model.gguf"
    for counts in ((2**40, 0), (0, 2**40), (2**40, 2**40)):
        path.write_bytes(b"GGUF\x03\0\0\0" + b"".join(count.to_bytes(8, "little") for count in counts))
        assert str(path) in outcome(model)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "has 16 weights, and its config.json describes" in outcome(model)
    path.write_bytes(path.read_bytes()[:-60])
    assert str(path) in outcome(model)


def test_a_file_in_place_of_a_directory_and_a_path_of_any_length_are_refused(model):
    assert "is a file; name the directory" in outcome(model / "config.json")
    assert "does not exist" in outcome("x" * 5000)
    (model / "tokenizer_config.json").write_text('{"model_max_length": [1]}')
    assert "tokenizer_config.json" in outcome(model)
