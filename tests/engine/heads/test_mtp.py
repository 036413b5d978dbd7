"""MTP layers: transformers' own drafts, from files in the published layouts, and keys and values of true states."""

import json
import shutil
from collections import ChainMap
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.heads.head import head_model
from engine.heads.registry import load_head, load_target
from engine.models.layers.experts import EXPERTS_NAME, experts_of, group_experts
from engine.params import SamplingParams
from tests.engine.running import make_engine, run
from tests.engine.tiny import EXPERTS, HEADS, LATENT, SIZES, backend_of, model_of, save, source_of

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


def randomized(mtp):
    torch.manual_seed(1)
    for tensor in mtp.layers.state_dict().values():
        values = torch.randn(tensor.shape)
        tensor.copy_(values * 0.25 if tensor.dim() > 1 else 1 + values * 0.5)
    return mtp


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    """A checkpoint with an MTP layer."""
    path = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    save(config, path, factor=3.0)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in randomized(MtpModel(reference(path), 1)).layers[0].state_dict().items():
        tensors |= published(name, tensor, LAYOUTS[request.param])
    if request.param == "DeepseekV3":  # copies
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


class Chain:
    """Drafts by hand over the target's cache."""

    def __init__(self, path, head=None):
        self.target = EagerBackend(load_target(source_of(path, head=str(head or path))))
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


@torch.inference_mode()
def expected_draft(lm, mtp, tokens, count):
    """The drafts of transformers' only layer, reused on its own states, as its generator does with more layers."""
    ids, positions, cache = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None], MtpCache(config=mtp.config)
    hidden = lm(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    logits = []
    for _ in range(count):
        hidden = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
        logits.append(mtp.shared_head(hidden)[0, -1])
        ids, positions = logits[-1].argmax()[None, None], positions[:, -1:] + 1
    return [int(row.argmax()) for row in logits], torch.stack(logits)


def next_candidate(lm, generator, tokens, num_accepted):
    """The token and logits of transformers' generator, after a pass that accepted some of the last draft."""
    hidden = lm(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    num_new = len(tokens) - 1 if generator.is_main_model_prefill else num_accepted + 1
    outputs, positions = CausalLMOutput(hidden_states=(hidden[:, -num_new:],)), torch.arange(len(tokens))[None]
    inputs = {"position_ids": positions}
    ids, (logits,) = generator.get_candidates(torch.tensor([tokens]), inputs, outputs, False, num_accepted)
    return int(ids[0, -1]), logits


def check_draft(drafted, logits, expected):
    assert drafted == expected[0]
    assert (logits - expected[1]).abs().max() < 1e-4


@torch.inference_mode()
def test_drafts_over_rounds_with_rejections_are_those_of_transformers(path):
    lm, chain, tokens, num_accepted = reference(path), Chain(path), TEXT[:6], 0
    generator = MTPCandidateGenerator(lm, GenerationConfig(do_sample=False), {})
    chain.compute(tokens[:-1], 0)
    for num_next in (2, 0, 1, 3, 0):
        drafted, logits = chain.draft(tokens, 3)
        token, first = next_candidate(lm, generator, tokens, num_accepted)
        assert token == drafted[0]
        assert (first - logits[0]).abs().max() < 1e-4
        check_draft(drafted, logits, expected_draft(lm, generator.mtp_model, tokens, 3))
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_with_drafts_is_the_targets_own(path, temperature):
    backend = EagerBackend(load_target(source_of(path, head=str(path))))
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=12)
    requests = [(TEXT[:9], params), (TEXT[4:6], params), (TEXT[:1], params)]
    expected = run(make_engine(backend_of(path), num_speculative_tokens=0), requests)
    engine = make_engine(backend, drafting="head", num_speculative_tokens=3, block_size=4)
    assert run(engine, requests) == expected
    assert engine.stats.num_draft_tokens > 0


@torch.inference_mode()
def test_a_layer_in_files_of_its_own_takes_the_state_before_the_embedding(tmp_path):
    target, head = (
        Path(save(transformers.Qwen3Config(**SIZES | HEADS), tmp_path / "target", factor=3.0)),
        tmp_path / "head",
    )
    lm = reference(target)
    lm.config.update({"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"], "mtp_hidden_states_first": True})
    mtp = randomized(MtpModel(lm, 1)).eval()
    names = {"post_norm": "final_layernorm", "enorm": "token_layernorm", "hnorm": "hidden_layernorm"}
    layout = ("mtp_layers.0.", names | {"eh_proj": "input_proj"})
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    tensors = [published(name, tensor, layout) for name, tensor in mtp.layers[0].state_dict().items()]
    save_file(dict(ChainMap(*tensors)), head / "model.safetensors")
    chain = Chain(target, head)
    chain.compute(TEXT[:8], 0)
    check_draft(*chain.draft(TEXT[:9], 3), expected_draft(lm, mtp, TEXT[:9], 3))


def test_layers_that_cannot_be_read_are_refused_by_name(path, tmp_path, caplog):
    lm = model_of(path).module

    def load(source):
        return load_head(source, source, lm, torch.device("cpu"), torch.bfloat16, LAYERS)

    source = source_of(path)
    assert source.configuration is not None  # which allows Mellum one layer
    source.settings["num_nextn_predict_layers"] = 2
    with caplog.at_level("INFO"):
        head = load(source)
    assert "the first of 2 MTP layers drafts every token" in caplog.text
    formats = {name: tensor.dtype for name, tensor in head.state_dict().items() if "bias" in name}
    assert set(formats.values()) <= {torch.float32}  # a router's bias is added to scores near 0, and may be large
    assert head.eh_proj.weight.dtype == torch.bfloat16
    source.settings["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match="is saved quantised, and so are its MTP layers"):
        load(source)
    tensors = load_file(path / "model.safetensors")
    own = [name for name in tensors if "mtp." in name or "layers.2." in name]
    for missing, message in ((own, "has no MTP layers in its checkpoint"), (own[-1:], "lacks the weights")):
        source = source_of(shutil.copytree(path, tmp_path / str(len(missing))))
        save_file({name: tensors[name] for name in tensors.keys() - missing}, source.directory / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load(source)


def test_cuda_backends_can_choose_the_experts_of_target_and_layer(path):
    model = load_target(source_of(path, head=str(path)))
    group_experts(model.module)
    assert {one.config._experts_implementation for one in experts_of(model.module)} == {EXPERTS_NAME}
    assert len(experts_of(model.head)) == 1
