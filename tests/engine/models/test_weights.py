"""Weights: windows are read whole and in order, whatever the blocks, and a model holds what transformers would load."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.models import loader, weights
from engine.models.causal_lm import Shard
from tests.engine.tiny import MISTRAL3, SIZES, model_of, save, source_of

CPU = torch.device("cpu")
COLUMNS = (slice(None), slice(10, 21))
WINDOWS = dict.fromkeys(("scale", "norm", "experts", "few"), ()) | {
    "rows": (slice(3, 9),),
    "columns": COLUMNS,
    "middle": COLUMNS,
}


@pytest.fixture
def source(target_path, tmp_path):
    """Two files of tensors of several shapes and formats, one of them with an odd number of bytes before it."""
    torch.manual_seed(0)
    first = {"norm": torch.randn(7), "rows": torch.randn(12, 5), "columns": torch.randn(9, 31).bfloat16()}
    second = {"scale": torch.tensor(2.5), "experts": torch.randn(3, 11, 13), "middle": torch.randn(3, 31, 2)}
    second["few"] = torch.randint(99, (5, 1), dtype=torch.int8)
    source = source_of(target_path)
    source.weight_files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file(first | {"unknown": torch.ones(3, dtype=torch.uint8)}, source.weight_files[0])
    save_file(second, source.weight_files[1], {"a header": "of another length"})
    source.tensors = first | second
    return source


class LateUpload:
    """A device that copies as late as it may: when it is waited for."""

    def __init__(self) -> None:
        self.num_bytes = self.num_waiting = self.most_waiting = 0

    def __call__(self, pinned, target):
        self.num_bytes += pinned.nbytes
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)

        def wait():
            self.num_waiting -= 1
            target.copy_(pinned)

        return wait


def read(source, upload):
    dtypes = {name: source.tensors[name].dtype for name in WINDOWS}
    return {
        name: window
        for name, _, window in weights.read(source, dtypes, CPU, lambda n, whole: whole[WINDOWS[n]], upload)
    }


@pytest.mark.parametrize(("block", "piece"), [(96, 40), (64, 8), (2**20, 2**20)])
def test_windows_are_read_whole_and_a_buffer_is_not_filled_before_its_copy_has_ended(source, block, piece, monkeypatch):
    monkeypatch.setattr(weights, "_BLOCK_BYTES", block)
    monkeypatch.setattr(weights, "_PIECE_BYTES", piece)
    upload = LateUpload()
    windows = read(source, upload)
    expected = {name: source.tensors[name][window] for name, window in WINDOWS.items()}
    assert windows.keys() == expected.keys()
    for name, tensor in expected.items():
        assert windows[name].dtype == tensor.dtype
        assert torch.equal(windows[name], tensor), name
    assert upload.num_waiting == 0
    assert upload.most_waiting == 2  # one is filled while the other is copied
    assert upload.num_bytes == sum(tensor.nbytes for tensor in expected.values())  # no other rank's


def test_on_a_cpu_contiguous_windows_stay_mapped_and_others_are_copied(source):
    windows = read(source, None)
    for name, window in WINDOWS.items():
        assert torch.equal(windows[name], source.tensors[name][window]), name
    with open("/proc/self/maps") as maps:
        files = [line.split() for line in maps if line.rstrip().endswith(".safetensors")]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in files]
    mapped = {name for name, window in windows.items() if any(a <= window.data_ptr() < b for a, b in ranges)}
    assert mapped == WINDOWS.keys() - {"columns", "middle"}


def rewrite(path, change):
    stored = load_file(path / "model.safetensors")
    change(stored)
    save_file(stored, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("shard", "rows"), [(None, 64), (Shard(1, 2, lambda x: x), 32)], ids=["whole", "rank"])
def test_a_file_that_lacks_a_weight_or_has_it_in_another_shape_is_refused(shard, rows, tmp_path):
    save(transformers.LlamaConfig(**SIZES), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, lambda stored: stored.update({name: stored[name][:48].clone()}))
    with pytest.raises(ModelError, match=rf"\[48, 32\] .* gives \[{rows}, 32\]"):
        model_of(tmp_path, shard)
    rewrite(tmp_path, lambda stored: stored.pop(name))
    with pytest.raises(ModelError, match=rf"lacks the weights {name}"):
        model_of(tmp_path, shard)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_are_found_under_either_name(name, tmp_path):
    save(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    rewrite(tmp_path, lambda stored: stored.update({name: stored.pop("model.embed_tokens.weight")}))
    module = model_of(tmp_path).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, load_file(tmp_path / "model.safetensors")[name])


def test_transformers_decides_on_tied_weights_that_are_saved_twice(tmp_path):
    save(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    head = torch.randn(64, 32)
    rewrite(tmp_path, lambda stored: stored.update({"lm_head.weight": head}))
    module = model_of(tmp_path).module
    assert torch.equal(module.lm_head.weight, head)
    assert not torch.equal(module.model.embed_tokens.weight, head)


@pytest.mark.parametrize(
    ("prefixes", "tied"),
    [(("language_model.model.", "language_model."), True), (("model.language_model.", ""), False)],
)
def test_the_text_part_of_a_model_for_images_is_a_model_by_itself(prefixes, tied, tmp_path, monkeypatch):
    """Whether it has a last layer of its own is for the files to say: what the configurations say differs."""
    save(transformers.Mistral3Config(**MISTRAL3, tie_word_embeddings=False), tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    text = {name.partition("language_model.")[2].removeprefix("model."): tensor for name, tensor in stored.items()
            if "language_model." in name and "lm_head" not in name}  # fmt: skip
    last = next(tensor for name, tensor in stored.items() if name.endswith("lm_head.weight"))
    renamed = {prefixes[0] + name: tensor for name, tensor in text.items()} | {"vision_tower.x": torch.zeros(2)}
    if not tied:
        renamed[f"{prefixes[1]}lm_head.weight"] = last
    (tmp_path / "model").mkdir()
    save_file(renamed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    transformers.Mistral3Config(**MISTRAL3).save_pretrained(tmp_path / "model")
    source = source_of(tmp_path / "model")
    loaded = model_of(tmp_path / "model").module
    assert (type(loaded).__name__, source.configuration.model_type) == ("MistralForCausalLM", "mistral")
    assert source.is_text_part
    assert source.configuration.tie_word_embeddings is tied
    assert torch.equal(loaded.lm_head.weight, text["embed_tokens.weight"] if tied else last)
    monkeypatch.setattr(loader, "has_names_of", lambda *_: False)
    for module in (loaded, model_of(tmp_path / "model").module):  # the latter is loaded by transformers
        for name in ("layers.1.mlp.down_proj.weight", "embed_tokens.weight", "norm.weight"):
            assert torch.equal(module.get_parameter(f"model.{name}"), text[name]), name
