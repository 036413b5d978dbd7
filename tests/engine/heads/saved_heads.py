"""Heads as directories on disk."""

from engine.training.new_head import save_head as save
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.tiny import model_of

CONFIGS = {
    "eagle3": head_config(taps=(1, 2), norm_before_residual=True),
    "dflash": block_config(taps=(2, 1)),
    "dspark": block_config(taps=(1, 2), kind="dspark", sample_from_anchor=True, markov_rank=4, markov_head_type="rnn"),
}


def save_head(path, target_path, kind="eagle3", *, seed=7):
    """Write a random head for a tiny target, in the form of `speculators`."""
    path.mkdir()
    model = model_of(target_path)
    save(path, random_head(model, CONFIGS[kind], seed=seed), model.module, str(target_path))
    return str(path)
