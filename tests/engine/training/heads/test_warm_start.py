import pytest
import torch

from engine.training.checkpoint import TrainingError
from engine.training.heads.new_head import HeadShape, make_head
from engine.training.heads.unroll import read_target
from engine.training.heads.warm_start import start_from
from engine.training.small_model import load_model


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


def test_a_head_that_drafts_no_blocks_is_refused(target):
    model, _ = load_model(target)
    with pytest.raises(TrainingError, match="eagle3 head cannot start from a draft"):
        start_from(make_head(HeadShape(kind="eagle3"), model, torch.ones(300)), model, model, torch.ones(1, 8))
