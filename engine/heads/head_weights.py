"""Loads a head under the names of `speculators`, whatever its files use; missing embeddings are the target's."""

import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.heads.config import HeadConfig
from engine.heads.head import Head
from engine.models.source import ModelSource
from engine.models.weights import FileNames, fill, mapped_tensors

_RENAMINGS: tuple[tuple[str, Any], ...] = (
    (r"^model\.", ""),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^encoder\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^(additional_layers\.\d+)\.hidden_norm\.", r"\1.input_layernorm."),
    (r"^additional_layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}."),
    (r"^draft_id_to_target_id$", "d2t"),
)
"""Patterns of authors' tensor names, and the names of `speculators`."""
_MAPS = ("d2t", "t2d")
_NOT_READ = re.compile(r"(verifier_(lm_head|norm)|confidence_head)\.|.*\.inv_freq$")
"""Tensors for training only, and DSpark's confidence, which measured acceptance replaces."""


def fill_head(head: Head, source: ModelSource, target: ModelSource, lm: nn.Module, device: torch.device) -> None:
    """Load a head's weights, or share the target's embedding and output head; raise ModelError if files do not fit."""
    config, model = head.config, cast("Any", lm)
    head.attach(lm, source)
    names = getattr(head, "names", None) or HeadNames()  # names of MTP layers depend on the target's family
    stored = {names.parameter(name): name for name in source.weight_shapes}
    embedding: Tensor = model.get_input_embeddings().weight
    # Only the weight: heads do not scale embeddings, even if their target does.
    embed_tokens = nn.Embedding(len(embedding), embedding.shape[-1], _weight=embedding)
    shared = {"embed_tokens": embed_tokens, "lm_head": model.get_output_embeddings()}
    shared = {name: module for name, module in shared.items() if f"{name}.weight" not in stored}
    for name in shared:
        shape = [*head.get_parameter(f"{name}.weight").shape]
        if shape != [config.vocab_size, config.target_hidden_size]:
            raise ModelError(f"the head {source.path} lacks {name}.weight, {shape}, and cannot use that of its target")
        setattr(head, name, nn.Identity())
    known = head.state_dict().keys() | {"", *_MAPS}
    if unknown := sorted(key for name, key in stored.items() if name not in known and not _NOT_READ.match(name)):
        raise ModelError(f"the head {source.path} has the unknown weights {', '.join(unknown[:3])}")
    fill(source, head, device, names)
    for name, module in shared.items():
        setattr(head, name, module)
    head.target_ids = _target_ids(source, config, names)
    if (target.directory / "tokenizer.json").exists():
        head.num_tokens = 1 + max(target.tokenizer.get_vocab().values())
    head.to(device).eval().requires_grad_(False)


def _target_ids(source: ModelSource, config: HeadConfig, names: FileNames) -> Tensor | None:
    """Return the target's id of each draft token, stored as ids or offsets; None if all are the same."""
    maps = {name: tensor for key, tensor in mapped_tensors(source) if (name := names.parameter(key)) in _MAPS}
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if "d2t" not in maps and size == vocab_size:
        return None
    stored, marked = maps.get("d2t", torch.empty(0)).long(), maps["t2d"].nonzero().flatten() if "t2d" in maps else None
    # Neighbours in the vocabulary have equal offsets, so numbers that always increase are ids.
    is_ids = bool((stored.diff() > 0).all()) if marked is None else torch.equal(stored, marked)
    ids = stored if is_ids else stored + torch.arange(len(stored))
    if len(ids) != size or not (ids.diff() > 0).all() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ModelError(f"the head {source.path} lacks a d2t of {size} increasing tokens below {vocab_size}")
    if marked is not None and not torch.equal(ids, marked):
        raise ModelError(f"the head {source.path} has a d2t and a t2d of different tokens")
    return ids if size < vocab_size else None


class HeadNames(FileNames):
    """Where the tensors of a head's files belong."""

    def __init__(self) -> None:
        pass  # transformers knows no other names

    def parameter(self, name: str) -> str:
        for pattern, replacement in _RENAMINGS:
            name = re.sub(pattern, replacement, name)
        return name

    def part(self, name: str, whole: Tensor) -> Tensor:
        return whole
