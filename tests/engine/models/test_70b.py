"""A 70B model over four ranks, on the meta device: what a rank reads in a pass, and which layers it has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

pytest.importorskip("triton", reason="the kernels need triton")
from engine.config import ModelConfig
from engine.execution.cuda import compiled_layers, linear
from engine.models import shards
from engine.models.causal_lm import Shard
from engine.models.layers.layer_attention import ATTENTION_NAME
from engine.models.layers.quantization import on_meta
from tests.engine.ranks import AbsentOthers

RANKS = 4
LLAMA_70B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(shards, "fill", lambda *_: None)
    monkeypatch.setattr(linear, "sum_in_order", lambda: None)
    monkeypatch.setattr(linear, "cublas_agrees", lambda *_, **__: True)
    config = ModelConfig("70B")
    source = SimpleNamespace(path="70B", configuration=LLAMA_70B, config=config, saved_format=None)
    shard = Shard(0, RANKS, AbsentOthers())
    skeleton = on_meta(LLAMA_70B, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    module = shards.load_shard(source, skeleton, shard, torch.bfloat16, torch.device("meta"))
    linear.make_invariant(module, torch.bfloat16)
    return module


def test_a_rank_reads_its_share_of_the_weights(rank):
    """An embedding is only looked up."""
    num_bytes = [p.nbytes for name, p in rank.state_dict().items() if "embed_tokens" not in name]
    assert sum(num_bytes) <= 34.8e9


def test_every_linear_layer_of_a_rank_is_invariant(rank):
    layers = {type(layer).__name__ for layer in rank.modules() if isinstance(layer, nn.Linear)}
    assert not {name for name in layers if not name.startswith("Invariant")}


def test_no_norm_is_computed_by_torchs_reduction(rank):
    """It chooses the order of its sums by the number of rows, so every norm must be in something compiled."""
    compiled_layers.compile_layers(rank)
    norms = {name for name, child in rank.named_modules() if "Norm" in type(child).__name__}
    compiled = [name for name, child in rank.named_modules() if "forward" in child.__dict__]
    assert not {name for name in norms if not any(f"{name}.".startswith(f"{outer}.") for outer in compiled)}
