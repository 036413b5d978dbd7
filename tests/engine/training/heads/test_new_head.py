import json

import pytest
import safetensors.torch
import torch

from engine.training.checkpoint import TrainingError
from engine.training.heads.new_head import HeadShape, make_head, save_head
from engine.training.small_model import load_model


def test_a_draft_vocabulary_is_the_most_frequent_tokens_in_order(target, tmp_path):
    model, _ = load_model(target)
    counts = torch.zeros(model.config.vocab_size, dtype=torch.int64)
    counts[[7, 3, 200]] = torch.tensor([5, 9, 5])
    head = make_head(HeadShape(kind="eagle3", draft_vocab=3), model, counts)
    save_head(tmp_path, head, model, "a/target")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].tolist() == [3, 6, 198]
    assert tensors["t2d"].nonzero().flatten().tolist() == [3, 7, 200]
    assert torch.equal(tensors["lm_head.weight"].float(), model.lm_head.weight[[3, 7, 200]].bfloat16().float())
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["speculators_config"]["verifier"]["name_or_path"] == "a/target"
    assert settings["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert settings["norm_before_residual"] is False


def test_parts_of_the_target_are_not_saved_and_the_mask_is_a_token_that_does_not_occur(target, tmp_path):
    model, _ = load_model(target)
    counts = torch.ones(model.config.vocab_size, dtype=torch.int64)
    counts[42] = 0
    save_head(tmp_path, make_head(HeadShape(kind="dflash"), model, counts), model, "t")
    assert (
        not {"embed_tokens.weight", "lm_head.weight", "d2t"}
        & safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    )
    assert json.loads((tmp_path / "config.json").read_text())["mask_token_id"] == 42


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (HeadShape(kind="medusa"), "kind is 'medusa'"),
        (HeadShape(taps=(0, 2)), "the target has layers 1 to 2"),
        (HeadShape(block_size=1), "block_size is 1; it must be from 2 to 64"),
        (HeadShape(draft_vocab=4000), "draft_vocab is 4000; it must be from 0 to 300"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(target, shape, problem):
    model, _ = load_model(target)
    with pytest.raises(TrainingError, match=problem):
        make_head(shape, model, torch.ones(model.config.vocab_size))
