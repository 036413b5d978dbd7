"""Makes a new head for a target, and writes a head's files in the form of `speculators`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from engine.heads.config import HeadConfig
from engine.heads.dense_context import read_target
from engine.heads.head import Head
from engine.heads.registry import HEADS
from engine.training.checkpoint import TrainingError, write_whole

KINDS = ("eagle3", "dflash", "dspark")
_BLOCK_FIELDS = ("block_size", "mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type")
_NORM_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of a new head.

    Attributes:
        taps: the target's layers whose outputs it reads, from 1 on; empty for layers 2, n / 2 and n - 3 of n.
        draft_vocab: tokens that it can draft, the most frequent of the text; 0 for all.
        block_size: places of a block, or passes of EAGLE-3's training-time test.
        markov_rank: rank of DSpark's part that depends on the previous token.
    """

    kind: str = "dspark"
    layers: int = 1
    taps: tuple[int, ...] = ()
    draft_vocab: int = 0
    block_size: int = 5
    markov_rank: int = 64


def make_head(shape: HeadShape, target: PreTrainedModel, counts: Tensor, like: PreTrainedModel | None = None) -> Head:
    """Make a head whose layers change nothing at first.

    `counts` [vocab] counts the text's tokens. `like`, by default the target, gives sizes, embedding and last layer.
    """
    like = like or target
    text, model, last = target.config, like.config, like.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_layers, vocab, kind = text.num_hidden_layers, text.vocab_size, shape.kind
    taps = shape.taps or tuple(sorted({min(num_layers, max(1, b)) for b in (2, num_layers // 2, num_layers - 3)}))
    if kind not in KINDS:
        raise TrainingError(f"kind is {kind!r}; it must be {', '.join(KINDS)}")
    if not all(1 <= tap <= num_layers for tap in taps):
        raise TrainingError(f"taps are {taps}; the target has layers 1 to {num_layers}")
    bounds = {"layers": (1, 64), "block_size": (2, 64), "draft_vocab": (0, vocab), "markov_rank": (1, vocab)}
    for name, (lowest, highest) in bounds.items():
        if not lowest <= (value := getattr(shape, name)) <= highest:
            raise TrainingError(f"{name} is {value}; it must be from {lowest} to {highest}")
    is_block, context = kind != "eagle3", text.max_position_embeddings
    # Layers with a window are causal inside a block, so a block shorter than in training draws the same tokens.
    layer_types = ["sliding_attention"] * shape.layers
    window = {"use_sliding_window": True, "sliding_window": context, "layer_types": layer_types}
    config: Any = AutoConfig.for_model(
        "qwen3" if is_block else "llama",
        vocab_size=vocab,
        num_hidden_layers=shape.layers,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": (model.rope_parameters or {}).get("rope_theta", 1e4)},
        head_dim=getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads,
        tie_word_embeddings=False,
        **{name: getattr(model, name) for name in _SIZES},
        **(window if is_block else {}),
    )
    of_kind: dict[str, Any] = {"fc_norm": True, "norm_output": True}
    if is_block:
        of_kind = {"block_size": shape.block_size, "mask_token_id": int(counts.argmin())}
    if kind == "dspark":
        of_kind |= {"sample_from_anchor": True, "markov_rank": shape.markov_rank, "markov_head_type": "rnn"}
    head = HEADS[kind](
        HeadConfig(
            kind=kind,
            layers=config,
            taps=taps,
            vocab_size=vocab,
            draft_vocab_size=shape.draft_vocab or vocab,
            target_hidden_size=text.hidden_size,
            **of_kind,
        ),
        like.get_input_embeddings(),
        last,
        first_layer=0,
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight")):
                parameter.mul_(0.1 if "markov" in name else 0)
    if shape.draft_vocab:
        head.target_ids = counts.argsort(descending=True, stable=True)[: shape.draft_vocab].sort().values
        head.lm_head = nn.Linear(config.hidden_size, shape.draft_vocab, bias=False)
        head.lm_head.weight.data = last.weight.detach()[head.target_ids].clone()
    return head


def save_head(folder: Path, head: Head, target: PreTrainedModel, target_name: str) -> None:
    """Write a head's weights in bfloat16, except weights shared with the target, then its configuration."""
    config = head.config
    shared = {
        "embed_tokens": head.embed_tokens is target.get_input_embeddings(),
        "lm_head": head.lm_head is target.get_output_embeddings(),  # type: ignore[no-untyped-call]
    }
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous().clone()
        for name, tensor in head.state_dict().items()
        if not shared.get(name.partition(".")[0])
    }
    if (ids := head.target_ids) is not None:
        tensors["d2t"] = ids.cpu() - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
    is_block = bool(config.block_size)
    method = {"proposal_type": "greedy", "speculative_tokens": min(config.max_draft_tokens, 4)}
    fields = asdict(config)
    settings = {
        "architectures": [f"{config.kind.capitalize()}DraftModel"],
        "speculators_model_type": config.kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": target.config.architectures},
        },
        "transformer_layer_config": config.layers.to_diff_dict(),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        f"{'' if is_block else 'eagle_'}aux_hidden_state_layer_ids": list(config.taps),
        **{name: fields[name] for name in (_BLOCK_FIELDS if is_block else _NORM_FIELDS)},
    }
    if config.kind == "dspark":
        settings |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    write_whole(folder / "model.safetensors", safetensors.torch.save(tensors, {"format": "pt"}))
    write_whole(folder / "config.json", (json.dumps(settings, indent=2) + "\n").encode())


_RIDGE = 1e-2
_SMALLEST = 0.02
"""Relative size below which singular values of the projections are left out of the fit."""


@torch.no_grad()
def start_from(head: Head, draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Fit a new head to a draft of its sizes, on texts [texts, length]; raise TrainingError if it cannot."""
    decoder: Any = draft.get_decoder()  # type: ignore[no-untyped-call]
    layers, head_layers = list(decoder.layers), list(head.get_submodule("layers").children())
    if draft.config.model_type != "llama" or draft.config.attention_bias or not head.drafts_blocks:
        raise TrainingError(f"a {head.config.kind} head cannot start from a draft of type {draft.config.model_type}")
    inputs: list[Tensor] = []
    hooks = [x.input_layernorm.register_forward_hook(lambda *call: inputs.append(call[2])) for x in layers]
    draft(input_ids=token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    taps, _ = read_target(target, head.config.taps, token_ids)
    features = torch.cat(taps, -1).flatten(0, 1)
    projections = [torch.cat([x.self_attn.k_proj.weight, x.self_attn.v_proj.weight]) for x in layers]
    outputs = torch.cat([u.flatten(0, 1) @ w.T for u, w in zip(inputs, projections, strict=True)], -1)
    ridge = _RIDGE * len(features) * torch.eye(features.shape[1], device=features.device)
    fitted = torch.linalg.solve(features.T @ features + ridge, features.T @ outputs)
    fc = torch.linalg.pinv(torch.cat(projections), rtol=_SMALLEST) @ fitted.T
    head.get_parameter("fc.weight").copy_(fc)
    head.get_parameter("hidden_norm.weight").fill_(float((features @ fc.T).square().mean(-1).sqrt().mean()))
    head.get_parameter("norm.weight").copy_(decoder.norm.weight)
    for layer, head_layer, hidden in zip(layers, head_layers, inputs, strict=True):
        head_layer.load_state_dict(layer.state_dict(), strict=False)
        normed: Any = head_layer.self_attn
        for name in ("q", "k"):
            projected = getattr(layer.self_attn, f"{name}_proj")(hidden)
            getattr(normed, f"{name}_norm").weight.fill_(float(projected.square().mean().sqrt()))
