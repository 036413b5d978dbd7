"""A workload on models that cost nothing, and a console to read."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.bench.workload import Cell, Workload


def save_model(path: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("target", "draft")):
        save_model(folder / name, seed=seed)
    return Workload(
        target=str(folder / "target"),
        draft=str(folder / "draft"),
        dtype="float32",
        device="cpu",
        compile="off",
        num_threads=torch.get_num_threads(),
        prompts=[[5, 6, 7], [8, 9], [10, 11, 12, 13]],
        cells=[Cell(1, 0.0), Cell(2, 0.7)],
        num_tokens=4,
    )


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=160)
