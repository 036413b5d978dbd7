import json

import safetensors.torch
import torch

from engine.training.head_training import read_target
from engine.training.new_head import HeadShape, make_head, save_head, start_from
from engine.training.small_model import load_model


def test_a_saved_head_has_the_most_frequent_tokens_and_no_parts_of_its_target(target, tmp_path):
    """Its mask is a token that does not occur."""
    model, _ = load_model(target)
    counts = torch.zeros(model.config.vocab_size, dtype=torch.int64)
    counts[[7, 3, 200]] = torch.tensor([5, 9, 5])
    save_head(tmp_path, make_head(HeadShape(kind="eagle3", draft_vocab=3), model, counts), model, "a/target")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [3, 6, 198]
    assert torch.equal(tensors["lm_head.weight"].float(), model.lm_head.weight[[3, 7, 200]].bfloat16().float())
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["speculators_config"]["verifier"]["name_or_path"] == "a/target"
    counts[:] = 1
    counts[42] = 0
    save_head(tmp_path, make_head(HeadShape(kind="dflash"), model, counts), model, "t")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t"} & tensors.keys()
    assert json.loads((tmp_path / "config.json").read_text())["mask_token_id"] == 42


def test_a_head_starts_with_keys_and_values_like_those_of_its_draft(target):
    model, _ = load_model(target)
    torch.manual_seed(0)
    draft, _ = load_model(target)
    ids = torch.randint(300, (16, 48))
    head = make_head(HeadShape(kind="dflash", layers=2), model, torch.ones(300), draft)
    start_from(head, draft, model, ids)
    taps, _ = read_target(model, head.config.taps, ids)
    features = head.feature([tap.flatten(0, 1) for tap in taps])
    normed = draft.model.layers[1].input_layernorm(read_target(draft, [1], ids)[0][0].flatten(0, 1))
    value = draft.model.layers[1].self_attn.v_proj(normed)
    fitted = head.layers[1].self_attn.v_proj(features)
    assert torch.nn.functional.cosine_similarity(fitted.flatten(), value.flatten(), 0) > 0.7
    assert torch.equal(head.layers[0].mlp.up_proj.weight, draft.model.layers[0].mlp.up_proj.weight)
