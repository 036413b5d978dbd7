"""HeadLM: a head by itself, in a draft worker. What it reads of its target's passes is sent there; see `FeatureStore`."""

import copy
from dataclasses import dataclass

from torch import nn

from engine.heads.head_weights import load_head
from engine.models.causal_lm import CausalLM
from engine.models.first_layers import decoder_layers
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.quantization import on_meta
from engine.models.loader import kv_dtype, model_info, resolve_device, resolve_dtype
from engine.models.source import ModelSource
from engine.models.weights import FileNames, fill


@dataclass
class HeadLM(CausalLM):
    """A head as a model of its own: the cache has its layers only."""

    @property
    def kv_shape(self) -> KVShape:
        """No layers but those of the head."""
        assert self.head is not None
        return self.head.kv_shape._replace(layers=0)


def load_head_lm(source: ModelSource) -> HeadLM:
    """Load the head that a target's configuration names, and of the target only what the head shares with it.

    Raises:
        ModelError: see `load_head`.
    """
    assert source.head is not None, "the configuration names a head"
    device = resolve_device(source.config.device)
    dtype = resolve_dtype(source.config.dtype, device)
    lm = on_meta(copy.deepcopy(source.configuration), dtype=dtype)
    names = FileNames(lm)
    path, _ = decoder_layers(lm)
    lm.set_submodule(path, nn.ModuleList())
    fill(source, lm, device, names)
    head = load_head(source.head, source, lm, device, dtype, first_layer=0)
    info = model_info(source, device, dtype, sum(p.numel() for p in head.parameters()))
    return HeadLM(head, source.configuration, info, device, dtype, None, kv_dtype(source.config), head)
