"""MTP layers: transformers' own drafts, from files in the published layouts, and keys and values of true states."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.heads.config import HeadConfig
from engine.heads.head import head_model
from engine.heads.mtp import MtpHead
from engine.heads.tapped import with_head
from tests.engine.tiny import EXPERTS, HEADS, LATENT, SIZES, model_of, save, source_of

LAYERS = SIZES["num_hidden_layers"]
MTP = {"num_mtp_layers": 1}
FAMILIES = {
    "DeepseekV3": EXPERTS | LATENT | MTP,
    "Glm4Moe": HEADS | EXPERTS | MTP,
    "Mellum": HEADS | EXPERTS | MTP | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}
LAYOUTS = {
    "DeepseekV3": ("model.layers.2.", {"post_norm": "shared_head.norm"}),
    "Glm4Moe": ("model.layers.2.", {"post_norm": "shared_head.norm"}),
    "Mellum": (
        "mtp.",
        {"post_norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"},
    ),
}
TEXT = torch.randint(2, 64, (24,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = list(range(1, 9))


def published(name, tensor, layout):
    """A tensor of transformers' MtpLayer as the files hold it: experts one by one."""
    prefix, names = layout
    part, _, rest = name.partition(".")
    if part != "mtp_block":
        return {f"{prefix}{names.get(part, part)}.{rest}": tensor}
    path = f"{prefix}layers.0.{rest}" if prefix == "mtp." else prefix + rest
    if not path.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {path: tensor}
    path, _, kind = path.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return {
        f"{path}.{i}.{part}.weight": piece.clone()
        for i, expert in enumerate(tensor)
        for part, piece in zip(parts, expert.chunk(len(parts)), strict=True)
    }


def reference(path):
    """transformers' model, which finds MTP layers by number only in the published sizes."""
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager").eval()
    lm._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\.", r"^mtp\."]
    return lm


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    """A checkpoint with an MTP layer."""
    path = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    save(config, path, factor=3.0)
    layer = MtpModel(reference(path), 1).layers[0]
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator) * (0.25 if tensor.dim() > 1 else 0.5)
        values = values if tensor.dim() > 1 else 1 + values
        tensors |= published(name, values, LAYOUTS[request.param])
    if request.param == "DeepseekV3":  # copies
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def load(path):
    source = source_of(path)
    model = model_of(path)
    head_config = HeadConfig(
        kind="mtp",
        layers=source.configuration,
        taps=(LAYERS,),
        vocab_size=64,
        draft_vocab_size=64,
        target_hidden_size=32,
    )
    lm = model.module
    head = MtpHead(head_config, lm.get_input_embeddings(), lm.get_output_embeddings(), LAYERS)
    head.load(source, lm)
    head.eval().requires_grad_(False)
    return EagerBackend(with_head(model, head))


class Chain:
    """Drafts by hand over the target's cache."""

    def __init__(self, path):
        self.target = load(path)
        self.kv = self.target.allocate_kv(9, 4)
        self.head, self.view = self.target.beside(head_model, self.kv)

    def compute(self, tokens, start):
        self.target.run(build([ForwardRow(tokens[start:], start, BLOCKS, 1)], self.kv))

    def draft(self, tokens, count):
        drafted, logits = [], []
        for _ in range(count):
            row = ForwardRow([*tokens, *drafted][-1:], len(tokens) + len(drafted) - 1, BLOCKS, 1)
            logits.append(self.head.run(build([row], self.view)).logits[0])
            drafted.append(int(logits[-1].argmax()))
        return drafted, torch.stack(logits)

    def cached(self):
        """The head's keys, values and states by place, [places, numbers] each."""
        caches = (self.kv.keys[LAYERS], self.kv.values[LAYERS], self.kv.states)
        return [cache[BLOCKS].flatten(0, 1).flatten(1) for cache in caches]


class Reference:
    """transformers' generator, and its only layer reused on its own states, as its generator does with more layers."""

    def __init__(self, path):
        self.lm = reference(path)
        self.generator = MTPCandidateGenerator(self.lm, GenerationConfig(do_sample=False), {})

    def draft(self, tokens, count, num_accepted):
        """Draft after a pass that accepted some of the last draft."""
        mtp, cache = self.generator.mtp_model, self.generator.mtp_cache
        ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        hidden = self.lm(input_ids=ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        num_new = num_accepted + 1 if cache.get_seq_length() else len(tokens) - 1
        outputs, inputs = CausalLMOutput(hidden_states=(hidden[:, -num_new:],)), {"position_ids": positions}
        ids, (first,) = self.generator.get_candidates(ids, inputs, outputs, False, num_accepted)
        scratch = MtpCache(config=self.lm.config.get_mtp_config())
        logits, tokens = [], ids[:, 1:-1]
        positions = positions[:, 1:]
        for _ in range(count):
            hidden = mtp.forward_layer(0, hidden, positions, scratch, input_ids=tokens)[:, -1:]
            logits.append(mtp.shared_head(hidden)[0, -1])
            tokens, positions = logits[-1].argmax()[None, None], positions[:, -1:] + 1
        assert (logits[0] - first).abs().max() < 1e-4
        assert ids[0, -1] == logits[0].argmax()
        return [int(row.argmax()) for row in logits], torch.stack(logits)


@torch.inference_mode()
def test_drafts_over_rounds_with_rejections_are_those_of_transformers(path):
    expected, chain, tokens, num_accepted = Reference(path), Chain(path), TEXT[:6], 0
    chain.compute(tokens[:-1], 0)
    for num_next in (2, 0, 1, 3, 0):
        drafted, logits = chain.draft(tokens, 3)
        expected_drafted, expected_logits = expected.draft(tokens, 3, num_accepted)
        assert drafted == expected_drafted
        assert (logits - expected_logits).abs().max() < 1e-4
        chain.compute([*tokens, *drafted], len(tokens) - 1)
        num_accepted = num_next
        tokens = [*tokens, *drafted[:num_accepted], TEXT[len(tokens)]]


@torch.inference_mode()
@pytest.mark.parametrize("num_accepted", range(4))
def test_after_a_verdict_keys_values_and_states_are_those_of_a_rebuild(path, num_accepted):
    chain, rebuilt, tokens = Chain(path), Chain(path), TEXT[:7]
    chain.compute(tokens[:3], 0)
    chain.compute(tokens[:-1], 3)
    drafted, _ = chain.draft(tokens, 3)
    chain.compute([*tokens, *drafted], len(tokens) - 1)
    tokens = [*tokens, *drafted[:num_accepted]]
    rebuilt.compute(tokens, 0)
    for cache, other in zip(chain.cached(), rebuilt.cached(), strict=True):
        assert other[1 : len(tokens)].abs().amax(-1).min() > 0.01
        assert (cache - other)[1 : len(tokens)].abs().max() < 1e-5
    tokens.append(5)
    assert chain.draft(tokens, 3)[0] == rebuilt.draft(tokens, 3)[0]
