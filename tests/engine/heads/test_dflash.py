"""DFlash and DSpark heads: blocks are those of the formulas and of transformers' generator."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import MuseGlimmerAssistantConfig, Qwen3Config
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from engine.execution.batch import ForwardRow, build
from engine.heads.dflash import MarkovHead
from engine.heads.head import NEVER, head_model
from engine.protocols import run_in_process
from tests.engine.heads.test_eagle3 import rms, rotated
from tests.engine.heads.tiny_heads import (
    VOCAB,
    backend_with_head,
    head_config,
    make_verifier,
    prefill,
    tapped,
    verify_row,
)

FULL, SLIDING = "full_attention", "sliding_attention"
ANCHOR, NON_CAUSAL = {"sample_from_anchor": True}, {"sliding_window_non_causal": True}
SHAPES = {
    "Qwen3-8B-DFlash-b16": {"types": [FULL] * 5, "block_size": 16, "taps": (1, 2, 1, 2, 1)},
    "Qwen3.5-35B-A3B-DFlash": {"types": [SLIDING] * 5 + [FULL], "block_size": 16, "taps": (2, 1) * 4},
    "Muse Glimmer": {"types": [SLIDING, FULL], "block_size": 8} | NON_CAUSAL,
    "dspark_qwen3_8b_block7": {"types": [FULL] * 5, "block_size": 7} | ANCHOR,
    "GLM-5.3-speculator.dspark": {"types": [SLIDING] * 3, "block_size": 8, "draft_vocab": 20} | ANCHOR,
}
WINDOW, BLOCK = 6, 4
SHARED = ("embed_tokens.weight", "lm_head.weight")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12}
SIZES |= {"rope_theta": 500.0, "sliding_window": WINDOW, "max_position_embeddings": 512, "vocab_size": VOCAB}


def block_config(types=(FULL,), kind="dflash", taps=(1, 2, 1), draft_vocab=VOCAB, **fields):
    types = {"layer_types": list(types), "num_hidden_layers": len(types), "use_sliding_window": SLIDING in types}
    fields = {"mask_token_id": 60, "block_size": 8} | fields
    return replace(
        head_config(kind, taps=taps, draft_vocab=draft_vocab, **fields), layers=Qwen3Config(**SIZES, **types)
    )


def dense_block(head, taps, anchor, count):
    """The last hidden vectors of a block's `count` places, by the formulas and without a cache."""
    layers, start = head.config.layers, len(taps[0])
    context = rms(F.linear(torch.cat(taps, -1), head.fc.weight), head.hidden_norm)
    hidden = head.embed_tokens.weight[torch.tensor([anchor] + [head.config.mask_token_id] * (count - 1))]
    positions = torch.arange(start + count, dtype=torch.float32)
    for kind, layer in zip(layers.layer_types, head.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        inputs = torch.cat([context, rms(hidden, layer.input_layernorm)])
        heads = [
            F.linear(inputs, getattr(attention, f"{name}_proj").weight).view(len(inputs), -1, 12) for name in "qkv"
        ]
        query, key = rms(heads[0], attention.q_norm)[start:], rms(heads[1], attention.k_norm)
        query = rotated(query.transpose(0, 1), positions[start:], 500.0)
        key, value = rotated(key.transpose(0, 1), positions, 500.0), heads[2].transpose(0, 1)
        distance = positions[start:, None] - positions
        visible = torch.ones_like(distance, dtype=torch.bool)
        if kind == SLIDING:
            visible = (distance < WINDOW) & ((distance >= 0) | head.config.sliding_window_non_causal)
        scores = (query @ key.transpose(1, 2) / 12**0.5).masked_fill(~visible, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + F.linear(mixed, attention.o_proj.weight)
        normed = rms(hidden, layer.post_attention_layernorm)
        gated = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
        hidden = hidden + F.linear(gated, mlp.down_proj.weight)
    return rms(hidden, head.norm)


def text_of(length, seed=0):
    return torch.randint(2, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def computed(backend, texts):
    """A cache that knows the texts but their last tokens, in two chunks each, and the texts' blocks."""
    kv = backend.allocate_kv(1 + 12 * len(texts), BLOCK)
    tables = [list(range(1 + 12 * i, 13 + 12 * i)) for i in range(len(texts))]
    for text, table in zip(texts, tables, strict=True):
        middle = len(text) // 2
        for start, end in ((0, middle), (middle, len(text) - 1)):
            if start < end:
                backend.run(build([ForwardRow(text[start:end], start, table, 1)], kv))
    return kv, tables


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_a_block_is_that_of_the_formulas(target_path, name):
    """Contexts of one token, up to the edge of a cached block, and longer than a window; all in one pass."""
    backend = backend_with_head(target_path, block_config(**SHAPES[name]))
    head, lengths = backend.model.head, (1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW + 7)
    texts = [text_of(1 + length, seed=length) for length in lengths]
    kv, tables = computed(backend, texts)
    beside, seen_kv = backend.beside(head_model, kv)
    counts = [head.config.block_size - i for i in range(len(texts))]
    rows = [
        ForwardRow([text[-1]] + [60] * (count - 1), len(text) - 1, table, count)
        for text, table, count in zip(texts, tables, counts, strict=True)
    ]
    logits = beside.run(build(rows, seen_kv)).logits.split(counts)
    for text, count, row in zip(texts, counts, logits, strict=True):
        hidden = dense_block(head, tapped(backend, text[:-1]), text[-1], count)
        expected = F.linear(hidden, head.lm_head.weight)
        drafted = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
        torch.testing.assert_close(row[:, drafted], expected, atol=1e-4, rtol=0)
        assert (row > NEVER).sum(-1).tolist() == [len(drafted)] * count


@pytest.mark.parametrize("types", [[FULL, FULL], [SLIDING, FULL]], ids=["full", "sliding"])
@torch.inference_mode()
def test_transformers_generator_drafts_the_same_tokens(target_path, types):
    """Its only model with such a head has the parts of ours, and other names for two of them."""
    config = block_config(types, sliding_window_non_causal=True, block_size=5)
    backend = backend_with_head(target_path, config)
    head, text = backend.model.head, text_of(9)
    # Its window of n has a place at each distance up to n.
    others = {"num_hidden_layers": 2, "layer_types": types, "rms_norm_eps": 1e-6, "sliding_window": WINDOW - 1}
    others |= {"target_layer_ids": [tap - 1 for tap in config.taps], "mask_token_id": 60, "block_size": 5}
    assistant = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**(SIZES | others))).eval()
    weights = {name: tensor for name, tensor in head.state_dict().items() if name not in SHARED}
    weights["encoder.fc.weight"] = weights.pop("fc.weight")
    weights["encoder.output_norm_enc.weight"] = weights.pop("hidden_norm.weight")
    assistant.load_state_dict(weights)
    options = SimpleNamespace(max_length=99, do_sample=False)
    generator = DFlashTokenCandidateGenerator(assistant, head.embed_tokens, head.lm_head, options)
    taps = zip(config.taps, tapped(backend, text[:-1]), strict=True)
    outputs = SimpleNamespace(hidden_states={tap: states[None] for tap, states in taps})
    inputs = {"position_ids": torch.arange(len(text))[None], "attention_mask": None}
    candidates, _ = generator.get_candidates(torch.tensor([text]), inputs, outputs, False, 0)
    verifier = make_verifier(backend)
    (verdict,) = run_in_process(verifier.verify([prefill(verifier, verify_row(text, 4))]))
    assert verdict.draft.token_ids == candidates[0, len(text) :].tolist()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_the_bias_of_a_markov_head_is_that_of_the_formulas(kind):
    torch.manual_seed(0)
    head = MarkovHead(block_config(markov_rank=5, markov_head_type=kind, draft_vocab=20))
    state, expected_state = None, torch.zeros(2, 5)
    for hidden, previous in zip(torch.randn(3, 2, 32), torch.randint(64, (3, 2)), strict=True):
        bias, state = head(previous, hidden, state)
        embedded = head.markov_w1.weight[previous]
        if kind == "gated":
            embedded = torch.sigmoid(head.gate_proj(torch.cat([hidden, embedded], -1))) * embedded
        if kind == "rnn":
            gate, candidate, output = head.joint_proj(torch.cat([expected_state, embedded, hidden], -1)).split(5, -1)
            expected_state = gate.sigmoid() * expected_state + (1 - gate.sigmoid()) * candidate.tanh()
            embedded = output.tanh()
        torch.testing.assert_close(bias, embedded @ head.markov_w2.weight.T)
