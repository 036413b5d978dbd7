"""Every kind of trained head by its name in `HeadConfig.kind`.

To add a kind, write its file with a subclass of `Head`, and give it a line here.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from engine.heads.config import read_head_config
from engine.heads.dflash import DFlashHead, DSparkHead
from engine.heads.eagle3 import Eagle3Head
from engine.heads.head import Head
from engine.heads.head_lm import HeadLM, load_without_layers
from engine.heads.head_weights import load_weights
from engine.heads.mtp import MtpHead
from engine.heads.peagle import PEagleHead
from engine.heads.tapped import with_head
from engine.models.causal_lm import CausalLM, Shard
from engine.models.loader import kv_dtype, load_model, model_info, resolve_device, resolve_dtype
from engine.models.source import ModelSource

HEADS: Mapping[str, type[Head]] = {
    "eagle3": Eagle3Head,
    "peagle": PEagleHead,
    "dflash": DFlashHead,
    "dspark": DSparkHead,
    "mtp": MtpHead,
}


def load_target(source: ModelSource, shard: Shard | None = None, *, keeps_kv: bool = True) -> CausalLM:
    """Load a model, as `load_model` does, and the head that its configuration names; see `load_head` and `TappedLM`."""
    model = load_model(source, shard)
    if source.head is None:
        return model
    layers = model.kv_shape.layers
    head = load_head(source.head, source, model.module, model.device, model.dtype, layers)
    return with_head(model, head, keeps_kv=keeps_kv)


def load_draft(source: ModelSource) -> CausalLM:
    """Load a model, or only the head that its configuration names; errors as of `load_model` and `load_head`."""
    if not source.config.head_only:
        return load_model(source)
    assert source.head is not None
    device = resolve_device(source.config.device)
    dtype = resolve_dtype(source.config.dtype, device)
    lm = load_without_layers(source, device, dtype)
    head = load_head(source.head, source, lm, device, dtype, first_layer=0)
    info = model_info(source, device, dtype, sum(parameter.numel() for parameter in head.parameters()))
    return HeadLM(head, source.configuration, info, device, dtype, None, kv_dtype(source.config), head)


def load_head(
    source: ModelSource, target: ModelSource, lm: nn.Module, device: torch.device, dtype: torch.dtype, first_layer: int
) -> Head:
    """Load a head.

    Args:
        lm: the target's module, whose embedding and last layer are used where the head's files have none.
        first_layer: the index of the head's first layer in the cache.

    Raises:
        ModelError: the head does not fit the target, or its files lack a tensor or have one that is unknown.
    """
    config = read_head_config(source, target)
    make_head = partial(HEADS[config.kind], config, first_layer=first_layer)
    return load_weights(make_head, source, target, lm, device, dtype)
