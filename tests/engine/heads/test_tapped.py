"""Tapped targets of every architecture: what a head gets are the outputs of the layers that it names, in its order."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.models.layers.layer_attention import KVShape
from tests.engine.heads.tiny_heads import backend_with_head, head_config
from tests.engine.tiny import model_of, save
from tests.families import tiny_config

TOKENS = torch.randint(2, 64, (19,), generator=torch.Generator().manual_seed(5)).tolist()
FAST = ("llama", "gemma2", "deepseek_v3")
NAMES = """
    apertus arcee bitnet cohere deepseek_v2 ernie4_5 gemma glm glm4 gpt_oss granite granitemoe hy_v3 minicpm3 minimax_m2
    ministral3 mistral mixtral nanochat olmo olmo2 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    solar_open starcoder2 vaultgemma youtu"""


class NotingHead(torch.nn.Module):
    """A head that keeps the outputs that it is given, and where they stand in the pass."""

    attends_from, drafts_blocks, state_size, keeps_kv = 1, False, 3, True
    kv_shape = KVShape(1, 1, 4, 4)

    def __init__(self, taps, first_layer):
        super().__init__()
        self.config = SimpleNamespace(taps=taps)
        self.first_layer, self.seen, self.absorbed = first_layer, [], []

    def feature(self, taps):
        self.seen.append([tap.clone() for tap in taps])
        return torch.zeros(len(taps[0]), self.state_size)

    def absorb(self, token_ids, positions, context):
        self.absorbed.append((token_ids, positions))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in (*FAST, *NAMES.split())]
)
@torch.inference_mode()
def test_taps_are_the_hidden_states_of_transformers(name, tmp_path):
    """In two chunks; the last layer's output is the one before the final norm, which transformers does not return."""
    save(tiny_config(name), tmp_path, factor=2.0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    base, normed = reference.base_model, []
    *_, norm = (child for child in base.children() if "norm" in type(child).__name__.lower())
    norm.register_forward_pre_hook(lambda _, inputs: normed.append(inputs[0]))
    hidden = base(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert len(hidden) == 3
    model = model_of(tmp_path)
    head = NotingHead((2, 1, 2), model.kv_shape.layers)
    backend = EagerBackend(with_head(model, head))
    head.seen, kv = [], backend.allocate_kv(9, 4)
    for start, end in ((0, 11), (11, 19)):
        backend.run(build([ForwardRow(TOKENS[start:end], start, list(range(1, 9)), 1)], kv))
    seen = [torch.cat(chunks) for chunks in zip(*head.seen, strict=True)]
    for tap, expected in zip(seen, (normed[-1], hidden[1], normed[-1]), strict=True):
        assert (tap - expected[0]).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("keeps_kv", [True, False])
def test_keys_and_values_are_kept_unless_a_drafter_elsewhere_keeps_them(keeps_kv, target_path):
    model = model_of(target_path)
    head = NotingHead((1,), model.kv_shape.layers)
    head.keeps_kv = keeps_kv
    EagerBackend(with_head(model, head))
    assert bool(head.absorbed) == keeps_kv


def test_a_model_knows_its_head_and_whether_it_is_one(target_path):
    model = backend_with_head(target_path, head_config()).model
    alone = head_model(model)
    assert (model.is_part, alone.is_part, model.is_split, alone.is_split) == (False, True, False, True)
    assert (model.attends_from, alone.attends_from, model_of(target_path).attends_from) == (1, 1, 0)
    model.head.keeps_kv = False
    assert model.is_split
    other = backend_with_head(target_path, head_config()).model
    model.replace_module(other.module)
    alone.replace_module(other.head)
    assert model.head is alone.head is other.head
