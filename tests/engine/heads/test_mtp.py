"""MTP layers: transformers' own drafts, from files in the published layouts, and keys and values of true states."""

import json

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
from tests.engine.tiny import EXPERTS, HEADS, LATENT, SIZES, model_of, save, source_of

LAYERS, SIZE = SIZES["num_hidden_layers"], SIZES["hidden_size"]
SLIDING = "sliding_attention"
WINDOWS = {"sliding_window": 5, "layer_types": [SLIDING, "full_attention", SLIDING], "num_mtp_layers": 1}
FAMILIES = {
    **dict.fromkeys(("DeepseekV3", "Glm4MoeLite"), EXPERTS | LATENT),
    "Glm4Moe": HEADS | EXPERTS,
    "Mellum": HEADS | EXPERTS | WINDOWS,
}
DEEPSEEK = [f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")]
QWEN = [f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")]
NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "")
MIMO = [f"mtp_layers.0.{name}" for name in NAMES]
TEXT = torch.randint(2, 64, (24,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = list(range(1, 9))


def renamed(tensors, layout):
    """Return the tensors with those of the layer under the names of a layout."""
    pairs = [*zip(DEEPSEEK, layout, strict=True), ("", "")]
    found = ((name, *next(pair for pair in pairs if name.startswith(pair[0]))) for name in tensors)
    return {new + name.removeprefix(old): tensors[name] for name, old, new in found}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    """A checkpoint with an MTP layer: a model's last layer under new names, and four more tensors."""
    path = tmp_path_factory.mktemp(request.param)
    sizes = SIZES | {"num_hidden_layers": LAYERS + 1} | FAMILIES[request.param]
    save(getattr(transformers, f"{request.param}Config")(**sizes), path, factor=3.0)
    settings, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    lists = {name: value[:LAYERS] for name, value in settings.items() if name in ("layer_types", "mlp_layer_types")}
    (path / "config.json").write_text(json.dumps(settings | lists | {"num_hidden_layers": LAYERS}))
    norms = (*DEEPSEEK[:2], DEEPSEEK[3], "model.norm")
    tensors |= {f"{name}.weight": torch.randn(SIZE) * 0.5 + 1 for name in norms}
    tensors[f"{DEEPSEEK[2]}.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.25
    if request.param == "DeepseekV3":
        tensors[f"{DEEPSEEK[4]}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(renamed(tensors, QWEN if request.param == "Mellum" else DEEPSEEK), path / "model.safetensors")
    return path


def reference(path):
    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip(f"transformers {transformers.__version__} has no reference")
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager").eval()
    if not hasattr(lm.config, "num_mtp_layers"):
        lm.config.update({"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]})
    lm._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\.", r"^mtp\."]  # else by the number of published sizes
    return lm


class Chain:
    """Drafts by hand over the target's cache."""

    def __init__(self, path, head=None):
        self.target = EagerBackend(load_target(source_of(path, head=str(head or path))))
        self.kv = self.target.allocate_kv(9, 4)
        self.head, self.view = self.target.beside(head_model, self.kv)

    def compute(self, tokens, start):
        self.target.run(build([ForwardRow(tokens[start:], start, BLOCKS, 1)], self.kv))

    def draft(self, tokens, count=3):
        drafted, logits = [], []
        for _ in range(count):
            row = ForwardRow([*tokens, *drafted][-1:], len(tokens) + len(drafted) - 1, BLOCKS, 1)
            logits.append(self.head.run(build([row], self.view)).logits[0])
            drafted.append(int(logits[-1].argmax()))
        return torch.stack(logits)

    def cached(self, count):
        """The head's keys, values and states of the first places, but for the first, whose pair does not exist."""
        caches = (self.kv.keys[LAYERS], self.kv.values[LAYERS], self.kv.states)
        return torch.cat([cache[BLOCKS].flatten(0, 1).flatten(1)[1:count] for cache in caches], -1)


@torch.inference_mode()
def expected_logits(lm, mtp, tokens, count=3):
    """Those of transformers' only layer, reused on its own states, as its generator does with more layers."""
    ids, positions, cache = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None], MtpCache(config=mtp.config)
    hidden, logits = lm(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1], []
    for _ in range(count):
        hidden = mtp.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
        logits.append(mtp.shared_head(hidden)[0, -1])
        ids, positions = logits[-1].argmax()[None, None], positions[:, -1:] + 1
    return torch.stack(logits)


@torch.inference_mode()
def test_drafts_are_those_of_transformers_and_verdicts_leave_what_a_rebuild_would(path):
    lm, chain, tokens, num_accepted = reference(path), Chain(path), TEXT[:6], 4
    generator = MTPCandidateGenerator(lm, GenerationConfig(do_sample=False), {})
    rebuilt = Chain(path)
    chain.compute(tokens[:3], 0)
    chain.compute(tokens[:-1], 3)
    for num_next in (2, 0, 1, 3, 0):
        logits, expected = chain.draft(tokens), expected_logits(lm, generator.mtp_model, tokens)
        assert (logits - expected).abs().max() < 1e-4
        hidden = lm(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        outputs = CausalLMOutput(hidden_states=(hidden[:, -num_accepted - 1 :],))
        inputs = {"position_ids": torch.arange(len(tokens))[None]}
        ids, first = generator.get_candidates(torch.tensor([tokens]), inputs, outputs, False, num_accepted)
        assert ids[0, -1] == logits[0].argmax()
        assert (first[0] - logits[:1]).abs().max() < 1e-4
        drafted, num_accepted = logits.argmax(-1).tolist(), num_next
        chain.compute([*tokens, *drafted], len(tokens) - 1)
        tokens = [*tokens, *drafted[:num_accepted], TEXT[len(tokens)]]
        rebuilt.compute(tokens[:-1], 0)
        assert (chain.cached(len(tokens) - 1) - rebuilt.cached(len(tokens) - 1)).abs().max() < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("path", ["Glm4Moe"], indirect=True)
def test_a_layer_in_files_of_its_own_takes_the_state_before_the_embedding(path, tmp_path):
    lm, tensors = reference(path), load_file(path / "model.safetensors")
    lm.config.mtp_hidden_states_first = True
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(DEEPSEEK[4])}
    save_file(renamed(layer, MIMO), tmp_path / "model.safetensors")
    chain = Chain(path, tmp_path)
    chain.compute(TEXT[:8], 0)
    assert (chain.draft(TEXT[:9]) - expected_logits(lm, MtpModel.from_pretrained(lm), TEXT[:9])).abs().max() < 1e-4


def test_what_cannot_be_read_is_refused_by_name_and_further_layers_are_logged(path, caplog):
    source, lm = source_of(path), model_of(path).module

    def load():
        return load_head(
            source, source, lm, torch.device("cpu"), torch.bfloat16, source.configuration.num_hidden_layers
        )

    formats = {name: tensor.dtype for name, tensor in load().mtp_block.state_dict().items()}
    assert {dtype for name, dtype in formats.items() if "bias" in name} <= {torch.float32}
    assert {dtype for name, dtype in formats.items() if "bias" not in name} == {torch.bfloat16}
    source.settings["num_nextn_predict_layers"] = 2
    with caplog.at_level("INFO"):
        load()
    assert "the first of 2 MTP layers drafts every token" in caplog.text
    source.settings["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match="is saved quantised, and so are its MTP layers"):
        load()
    source.weight_shapes = dict.fromkeys(lm.state_dict(), ())
    with pytest.raises(ModelError, match="has no MTP layers in its checkpoint"):
        load()
