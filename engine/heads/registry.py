"""Every kind of trained head by its name in `HeadConfig.kind`; a new kind is a subclass of `Head` and a line here."""

import threading
from collections.abc import Mapping

import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from engine.heads.config import read_head_config
from engine.heads.dflash import DFlashHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.head import Head, without_target
from engine.heads.head_weights import fill_head
from engine.heads.mtp import MtpHead
from engine.heads.peagle import PEagleHead
from engine.heads.tapped import with_head
from engine.models.causal_lm import CausalLM, Shard
from engine.models.files import names_model
from engine.models.layers.latent import cache_latents
from engine.models.loader import check_module, load_model
from engine.models.source import ModelSource

HEADS: Mapping[str, type[Head]] = {
    "eagle3": Eagle3Head,
    "peagle": PEagleHead,
    "dflash": DFlashHead,
    "dspark": DFlashHead,
    "mtp": MtpHead,
}

_MAKING = threading.Lock()
"""Held while torch's functions that draw weights are replaced in the process, for ranks that are threads."""


def load_target(source: ModelSource, shard: Shard | None = None, *, keeps_kv: bool = True) -> CausalLM:
    """Load a model and its configured head, or only the head; see `load_model`, `load_head` and `Head.keeps_kv`."""
    model = load_model(source, shard)
    if source.head is None:
        return model
    layers = model.kv_shape.layers
    head = load_head(source.head, source, model.module, model.device, model.dtype, layers)
    head.keeps_kv = keeps_kv
    cache_latents(head)
    if source.config.head_only:
        return without_target(model, head, name=source.head.path)
    return with_head(model, head)


def check_target(source: ModelSource) -> None:
    """Raise ModelError if headers of files show that a model and its configured head cannot be loaded."""
    module = check_module(source)
    if source.head is not None:
        load_head(source.head, source, module, torch.device("meta"), torch.float32, 0)


@names_model
def load_head(
    source: ModelSource, target: ModelSource, lm: nn.Module, device: torch.device, dtype: torch.dtype, first_layer: int
) -> Head:
    """Load a head over the target's module `lm`; `first_layer` is its first layer's index in the cache.

    Raises ModelError if the head does not fit the target, or its files lack a tensor or have an unknown tensor.
    """
    config = read_head_config(source, target)
    hidden = config.layers.hidden_size
    with _MAKING, no_init_weights(), local_torch_dtype(dtype), torch.device("meta" if device.type == "meta" else "cpu"):
        embed_tokens = nn.Embedding(config.vocab_size, hidden)
        lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        head = HEADS[config.kind](config, embed_tokens, lm_head, first_layer)
    fill_head(head, source, target, lm, device)
    return head
