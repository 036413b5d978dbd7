import pytest
import torch

from engine.training.__main__ import main
from engine.training.heads.train_head import losses, weights_of


@pytest.mark.parametrize("options", [["--kind", "eagle3", "--draft-vocab", "100"], ["--kind", "dspark"]])
def test_a_run_is_resumed_and_its_head_learns(corpus, target, tmp_path, options, capfd):
    command = ["head", str(corpus), "--target", str(target), "--output", str(tmp_path), "--batch-tokens", "128"]
    command += ["--continuations", "8", "--reports", "0", "--no-compile", "--block-size", "3", *options]
    assert main([*command, "--steps", "2"]) == 0
    assert main([*command, "--steps", "30"]) == 0
    assert "resuming after step 2" in capfd.readouterr().err
    assert main([*command, "--steps", "31", "--markov-rank", "3"]) == 1
    again = [*command, "--output", str(tmp_path / "more"), "--head", str(tmp_path), "--steps", "1"]
    assert main(again) == 0
    assert (tmp_path / "more" / "model.safetensors").exists()


def test_losses_are_divergence_and_variation():
    logits, target = torch.tensor([[0.0, 0.0], [3.0, -1.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    divergence, variation = losses("eagle3", logits, target)
    probs = logits[1].softmax(-1)
    assert divergence.tolist() == pytest.approx([0.0, float((0.5 * (0.5 / probs).log()).sum())], abs=1e-6)
    assert variation.tolist() == pytest.approx([0.0, float(probs[0] - 0.5)], abs=1e-6)
    both, _ = losses("dspark", logits, target)
    torch.testing.assert_close(both, 0.9 * variation + 0.1 * divergence)
    assert weights_of("eagle3", 3).diff().max() < 0
    assert weights_of("dspark", 3).tolist() == [1, 1, 1]
