"""The published forms of config.json, and what is refused."""

from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from engine.errors import ModelError
from engine.heads.config import kind_of, read_head_config, verifier_of
from tests.engine.heads.files import source_of, target_of

QWEN3_8B = (36, 4096, 151936)
GROUPS = {"num_attention_heads": 32, "num_key_value_heads": 8}
LAYERS_8B = GROUPS | {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
LAYERS_8B |= {"num_hidden_layers": 1, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
METHOD = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
VERIFIER = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
PROPOSALS = {"default_proposal_method": "greedy", "proposal_methods": [METHOD], "verifier": VERIFIER}
FORM = {"speculators_model_type": "eagle3", "speculators_config": PROPOSALS | {"algorithm": "eagle3"}}
EAGLE3 = FORM | {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 32000, "norm_before_residual": True}
EAGLE3 |= {"target_hidden_size": None, "transformer_layer_config": LAYERS_8B}
GPT_OSS_LAYERS = {"model_type": "llama", "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088}
GPT_OSS_LAYERS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 1}
GPT_OSS_LAYERS |= {"rope_parameters": {"rope_theta": 150000.0, "rope_type": "default"}}
GPT_OSS = EAGLE3 | {"architectures": ["Eagle3DraftModel"], "draft_vocab_size": 64000, "norm_before_fc": True}
GPT_OSS |= {"transformer_layer_config": GPT_OSS_LAYERS}
LLAMA_31 = GROUPS | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096}
LLAMA_31 |= {"intermediate_size": 14336, "num_hidden_layers": 1, "vocab_size": 128256, "draft_vocab_size": 32000}
LLAMA_31 |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
SPECFORGE = LLAMA_31 | {"architectures": ["LlamaForCausalLMEagle3"]}
SPECFORGE |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True}}
NEBIUS = SPECFORGE | {"eagle_aux_hidden_state_layer_ids": [3, 40, 77], "eagle_config": {}, "target_hidden_size": 8192}
PEAGLE = LLAMA_31 | {"num_hidden_layers": 4, "ptd_token_id": 128255}
DFLASH = LAYERS_8B | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5}
DFLASH |= {"block_size": 16, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}}
QWEN35 = {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37]}
QWEN35_DFLASH = DFLASH | {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 248320, "block_size": None}
QWEN35_DFLASH |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
QWEN35_DFLASH |= {"sliding_window": 4096, "dflash_config": QWEN35}
GLM_LAYERS = {"hidden_size": 6144, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3, "head_dim": 64}
GLM_LAYERS |= {"sliding_window": 2048, "num_attention_heads": 64, "vocab_size": 154880}
GLM_DSPARK = FORM | {"speculators_model_type": "dspark", "block_size": 8, "draft_vocab_size": 154880}
GLM_DSPARK |= {"aux_hidden_state_layer_ids": [2, 20, 39, 58, 75], "mask_token_id": 154856, "markov_rank": 256}
GLM_DSPARK |= {"markov_head_type": "vanilla", "sample_from_anchor": True, "transformer_layer_config": GLM_LAYERS}
GLM_DSPARK |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
DEEPSPEC = DFLASH | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "dflash_config": None, "markov_rank": 256}
DEEPSPEC |= {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669, "sample_from_anchor": True}
MTP = FORM | {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
MTP |= {"transformer_layer_config": {"model_type": "qwen3", "hidden_size": 4096}}
BLOCK = {"block_size": 16, "mask_token_id": 151669}
PUBLISHED = {
    "eagle3": (EAGLE3, QWEN3_8B, 3, (2, 18, 33), {"norm_before_residual": True, "draft_vocab_size": 32000}, 1e6),
    "gpt-oss": (GPT_OSS, (24, 2880, 201088), 3, (2, 12, 21), {"norm_before_fc": True, "fc_norm": False}, 150000.0),
    "llama": (LLAMA_31, (32, 4096, 128256), 3, (2, 16, 29), {"norm_before_residual": False, "block_size": 0}, 10000.0),
    "specforge": (SPECFORGE, (32, 4096, 128256), 3, (2, 16, 29), {"draft_vocab_size": 32000}, 10000.0),
    "nebius": (NEBIUS, (80, 8192, 128256), 3, (3, 40, 77), {"target_hidden_size": 8192}, 10000.0),
    "peagle": (PEAGLE, (32, 4096, 128256), 3, (2, 16, 29), {"mask_token_id": 128255}, 10000.0),
    "dflash": (DFLASH, QWEN3_8B, 5, (2, 10, 18, 26, 34), BLOCK | {"max_draft_tokens": 15}, 1e6),
    "qwen3.5": (
        QWEN35_DFLASH,
        (40, 2048, 248320),
        8,
        (2, 7, 12, 17, 23, 28, 33, 38),
        {"block_size": 16, "mask_token_id": 248077, "draft_vocab_size": 248320, "sliding_window_non_causal": False},
        1e6,
    ),
    "glm": (
        GLM_DSPARK,
        (78, 6144, 154880),
        5,
        (2, 20, 39, 58, 75),
        {"max_draft_tokens": 8, "sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"},
        10000.0,
    ),
    "deepspec": (DEEPSPEC, QWEN3_8B, 5, (2, 10, 18, 26, 34), {"max_draft_tokens": 7, "markov_rank": 256}, 1e6),
}
KINDS = ["eagle3"] * 5 + ["peagle", "dflash", "dflash", "dspark", "dspark"]


def read(tmp_path, settings, target=QWEN3_8B, num_taps=3, **shapes):
    layers, hidden, vocab = target
    width = settings.get("transformer_layer_config", settings).get("hidden_size", 0)
    shapes = {"fc.weight": [width, num_taps * hidden]} | shapes
    target = target_of(tmp_path / "target", layers=layers, hidden=hidden, vocab=vocab)
    return read_head_config(source_of(tmp_path / "head", settings, **shapes), target)


@pytest.mark.parametrize(("name", "kind"), list(zip(PUBLISHED, KINDS, strict=True)))
def test_published_heads_are_read(tmp_path, name, kind):
    settings, target, num_taps, taps, fields, theta = PUBLISHED[name]
    assert kind_of(settings) == kind
    head = read(tmp_path, settings, target, num_taps)
    assert (head.kind, head.taps) == (kind, taps)
    assert {field: getattr(head, field) for field in fields} == fields
    own = settings.get("transformer_layer_config", settings)
    assert head.layers.rope_parameters["rope_theta"] == theta
    for field in ("hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "layer_types", "sliding_window"):
        if field in own:
            assert getattr(head.layers, field) == own[field]


def test_an_mtp_layer_is_computed_with_the_targets_configuration(tmp_path):
    head = read(tmp_path, MTP)
    assert (head.kind, head.taps, head.layers.num_hidden_layers) == ("mtp", (36,), 1)
    target = target_of(tmp_path / "own", layers=4, hidden=64, vocab=100)
    assert read_head_config(target, target).kind == "mtp"


def test_whole_models_are_no_heads_and_a_head_may_name_its_target():
    assert kind_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "pard_token": 5}) is None
    assert kind_of({"architectures": ["Qwen3ForCausalLM"], "mtp_num_hidden_layers": 1}) is None
    assert kind_of({"dflash_config": {"projector_type": "dspark"}}) == "dspark"
    assert kind_of({"architectures": ["LlamaEagle3DraftModel"], "mask_token_id": 3}) == "peagle"
    assert (verifier_of(EAGLE3), verifier_of(LLAMA_31)) == ("Qwen/Qwen3-8B", None)


def layers(**changes):
    return {"transformer_layer_config": LAYERS_8B | changes}


def proposal(**changes):
    return {"speculators_config": PROPOSALS | {"proposal_methods": [changes]}}


def section(head, name, **changes):
    return head | {name: head[name] | changes}


def without(head, *names):
    return {name: value for name, value in head.items() if name not in names}


AUX = "aux_hidden_state_layer_ids"
REFUSED = {
    "it is a whole model; heads are": without(LLAMA_31, "draft_vocab_size"),
    "it is medusa; heads are": EAGLE3 | {"speculators_model_type": "medusa"},
    "verifier_accept_k is 3, and only 1 is served": EAGLE3 | proposal(verifier_accept_k=3),
    "use_aux_hidden_state is False": section(SPECFORGE, "eagle_config", use_aux_hidden_state=False),
    "causal is True": section(DFLASH, "dflash_config", causal=True),
    "quantization_config is": EAGLE3 | layers(quantization_config={"quant_method": "fp8"}),
    "norm_before_residual is missing": without(EAGLE3, "norm_before_residual"),
    "norm_before_fc and fc_norm exclude each other": EAGLE3 | {"norm_before_fc": True, "fc_norm": True},
    "its vocab_size is 152064, and that of the target .* 151936": EAGLE3 | layers(vocab_size=152064),
    "its target_hidden_size is 5120, and the hidden_size of the target .* 4096": EAGLE3 | {"target_hidden_size": 5120},
    "draft_vocab_size is 200000, and vocab_size 151936": EAGLE3 | {"draft_vocab_size": 200000},
    "model_type of its layers is mistral, not llama or qwen3": EAGLE3 | layers(model_type="mistral"),
    "layer_types has linear_attention, which no": EAGLE3 | layers(layer_types=["linear_attention"]),
    "sliding_window is missing, but layer_types": EAGLE3 | layers(layer_types=["sliding_attention"]),
    "the field of tapped layers is missing": without(GLM_DSPARK | layers(model_type="qwen3"), AUX)
    | {"mask_token_id": 1, "draft_vocab_size": None},
    "eagle_aux_hidden_state_layer_ids means the outputs of layers 0, 18, 33 of 36 of its target": EAGLE3
    | {"eagle_aux_hidden_state_layer_ids": [0, 18, 33]},
    r"layers 2, 18, 33, 34, 4 times 4096 numbers, but fc.weight reads \[12288\]": EAGLE3
    | {"eagle_aux_hidden_state_layer_ids": [2, 18, 33, 34]},
    "ids and eagle_config.eagle_aux_hidden_state_layer_ids differ": EAGLE3
    | {
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
    },
    "mask_token_id is 151936; it must be a token": section(DFLASH, "dflash_config", mask_token_id=151936),
    "block_size is None; it must be at least 2": without(DFLASH, "block_size"),
    "sample_from_anchor is missing": without(DEEPSPEC, "sample_from_anchor"),
    "markov_head_type is gru; it must be vanilla or gated or rnn": DEEPSPEC | {"markov_head_type": "gru"},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_served_is_refused_by_name(tmp_path, problem):
    with pytest.raises(ModelError, match=f"the head .*head cannot be served: .*{problem}"):
        read(tmp_path, REFUSED[problem], num_taps=5 if "dflash_config" in REFUSED[problem] else 3)


def test_the_nested_rope_base_and_the_flags_of_blocks_are_honoured(tmp_path):
    rope = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    settings = section(DFLASH, "dflash_config", causal=False, query_zero_predicts_next=True) | rope
    head = read(tmp_path, without(settings, "rope_theta"), num_taps=5, **{"fc.bias": [4096]})
    assert head.layers.rope_parameters["rope_theta"] == 500000.0
    assert (head.sliding_window_non_causal, head.sample_from_anchor, head.fc_bias) == (True, True, True)
    assert (head.max_draft_tokens, head.markov_rank) == (16, 0)


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, (1.0, None)),
        ("gemma2", {"final_logit_softcapping": 20.0}, (1.0, 20.0)),
        ("cohere", {"logit_scale": 0.25}, (0.25, None)),
        ("granite", {"logits_scaling": 8.0}, (0.125, None)),
        ("hyperclovax", {"logits_scaling": 8.0}, (8.0, None)),
    ],
)
def test_a_head_has_its_targets_logit_scale_and_cap(model_type, fields, expected):
    """Each family's own configuration is read as the family's `forward` uses it."""
    text = CONFIG_MAPPING[model_type](vocab_size=64, hidden_size=32, num_hidden_layers=2, **fields)
    target = SimpleNamespace(path="target", configuration=text)
    head = read_head_config(SimpleNamespace(path="target", settings={}), target)
    assert (head.logit_scale, head.logit_cap) == expected
