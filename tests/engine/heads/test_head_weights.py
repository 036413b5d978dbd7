"""Loading heads in both forms, their vocabularies, what they share with the target, and what is refused."""

import json

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.heads.config import read_head_config
from engine.heads.registry import HEADS, check_target, load_target
from engine.models.registry import open_model
from tests.engine.heads.files import LAYERS, head_settings, head_tensors, save_head
from tests.models import save_llama

IDS = torch.tensor([0, 1, 2, 5, 6, 40, 63])
MARKED = torch.zeros(64, dtype=torch.bool).index_fill(0, IDS, True)
OFFSETS = IDS - torch.arange(len(IDS))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_llama(tmp_path_factory.mktemp("target"), seed=0))


@pytest.fixture
def load(target, tmp_path):
    def load(settings, tensors, dtype="float32"):
        head = save_head(tmp_path / "head", settings, tensors)
        return load_target(open_model(ModelConfig(target, head=head, dtype=dtype, device="cpu")))

    return load


def cut(**maps):
    return head_tensors(draft_vocab=len(IDS)) | maps


def test_both_forms_of_a_head_load_to_equal_tensors(load):
    tensors = head_tensors()
    states = [load(head_settings(), tensors).head.state_dict()]
    research = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    flat = LAYERS | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}, "draft_vocab_size": 64}
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 0]}
    states.append(load(flat, research | {"rotary_emb.inv_freq": torch.ones(2)}).head.state_dict())
    states.append(load(flat, {f"model.{name}": tensor for name, tensor in tensors.items()}).head.state_dict())
    for state in states:
        assert state.keys() == tensors.keys() | {"embed_tokens.weight"}
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_a_head_shares_what_its_files_lack(load):
    tensors = head_tensors()
    del tensors["lm_head.weight"]
    model = load(head_settings(), tensors)
    lm = model.module.lm
    assert model.head.lm_head is lm.get_output_embeddings()
    assert model.head.embed_tokens.weight.data_ptr() == lm.get_input_embeddings().weight.data_ptr()
    assert (model.head.first_layer, model.head.layers[0].self_attn.layer_idx) == (2, 2)
    rotary = model.head.rotary_emb.inv_freq
    assert rotary.tolist() == pytest.approx([500.0 ** (-i / 4) for i in range(4)])


def test_a_head_has_its_own_embedding_and_width(load):
    narrow = LAYERS | {"hidden_size": 16}
    settings = head_settings(transformer_layer_config=narrow, target_hidden_size=32)
    tensors = head_tensors(hidden=16)
    with pytest.raises(ModelError, match=r"head lacks embed_tokens.weight, \[64, 16\], and cannot use that of its"):
        load(settings, tensors)
    tensors["embed_tokens.weight"] = torch.randn(64, 16)
    model = load(settings, tensors, dtype="bfloat16")
    assert torch.equal(model.head.embed_tokens.weight, tensors["embed_tokens.weight"].bfloat16())
    assert model.head.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    "maps",
    [{"d2t": OFFSETS}, {"d2t": IDS.int()}, {"draft_id_to_target_id": OFFSETS, "model.t2d": MARKED}],
)
def test_draft_tokens_are_mapped_by_offsets_or_by_ids(load, maps):
    head = load(head_settings(draft_vocab_size=len(IDS)), cut(**maps)).head
    assert torch.equal(head.target_ids, IDS)
    logits = head.vocab_logits(torch.ones(1, 32))
    assert ((logits > -1e29).nonzero()[:, 1]).tolist() == IDS.tolist()


@pytest.mark.parametrize(
    ("maps", "problem"),
    [
        ({}, "lacks a d2t of 7 increasing tokens below 64"),
        ({"d2t": OFFSETS + 1}, "lacks a d2t of 7"),
        ({"d2t": OFFSETS[:6]}, "lacks a d2t of 7"),
        ({"d2t": OFFSETS.flip(0)}, "lacks a d2t of 7"),
        ({"d2t": OFFSETS, "t2d": MARKED.roll(1)}, "a d2t and a t2d of different tokens"),
    ],
)
def test_a_wrong_map_is_refused(load, maps, problem):
    with pytest.raises(ModelError, match=problem):
        load(head_settings(draft_vocab_size=len(IDS)), cut(**maps))


def test_missing_unknown_and_misshapen_weights_are_refused_by_name(load, target, tmp_path):
    tensors = head_tensors()
    with pytest.raises(
        ModelError, match=r"head has the unknown weights g_proj.weight, layers.0.self_attn.q_norm.weight"
    ):
        load(head_settings(), tensors | {f"{n}.weight": torch.ones(8) for n in ("g_proj", "layers.0.self_attn.q_norm")})
    with pytest.raises(ModelError, match="head has the unknown weights"):
        check_target(open_model(ModelConfig(target, head=str(tmp_path / "head"))))
    with pytest.raises(ModelError, match=r"head lacks the weights layers.0.hidden_norm.weight"):
        load(head_settings(), {name: tensor for name, tensor in tensors.items() if "hidden_norm" not in name})
    with pytest.raises(ModelError, match=r"lm_head.weight is \[60, 32\] .* gives \[64, 32\]"):
        load(head_settings(), tensors | {"lm_head.weight": torch.ones(60, 32)})
    trained = {"verifier_lm_head.weight": torch.ones(2), "confidence_head.proj.bias": torch.ones(1)}
    load(head_settings(), tensors | trained)


def test_no_token_beyond_the_tokenizer_is_drafted(tmp_path):
    target = save_llama(tmp_path / "target", seed=0)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"t{i}": i for i in range(60)}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    head = save_head(tmp_path / "head", head_settings(), head_tensors())
    model = load_target(open_model(ModelConfig(str(target), head=head, device="cpu", dtype="float32")))
    logits = model.head.vocab_logits(torch.ones(1, 32))
    assert (logits[0] > -1e29).tolist() == [True] * 60 + [False] * 4


BLOCK = {"draft_vocab_size": 64, "mask_token_id": 2, "aux_hidden_state_layer_ids": [2, 1]}
KINDS = {
    "peagle": {"eagle_aux_hidden_state_layer_ids": [2, 1], "norm_output": True, "fc_norm": True} | BLOCK,
    "dflash": BLOCK | {"block_size": 4},
    "dspark": BLOCK | {"block_size": 4, "sample_from_anchor": True, "markov_rank": 8, "markov_head_type": "rnn"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_loads_what_it_saves(target, tmp_path, kind):
    layers = LAYERS | {"model_type": "qwen3"}
    settings = {"speculators_model_type": kind, "transformer_layer_config": layers} | KINDS[kind]
    save_head(tmp_path / "head", settings, {"fc.weight": torch.zeros(32, 64)})
    target = open_model(ModelConfig(target, head=str(tmp_path / "head"), device="cpu", dtype="float32"))
    config = read_head_config(target.head, target)
    torch.manual_seed(0)
    made = HEADS[kind](config, torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False), 2)
    save_head(tmp_path / "head", settings, made.state_dict())
    loaded = load_target(open_model(target.config)).head
    assert type(loaded) is HEADS[kind]
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.state_dict().keys() == made.state_dict().keys()
