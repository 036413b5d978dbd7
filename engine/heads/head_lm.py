"""HeadLM: a head by itself, in a draft worker. What it reads of its target's passes is sent there; see `FeatureStore`."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from engine.models.causal_lm import CausalLM
from engine.models.first_layers import decoder_layers
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.quantization import on_meta
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


def load_without_layers(source: ModelSource, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load what a model has before and after its decoder layers, and none of these."""
    lm = on_meta(copy.deepcopy(source.configuration), dtype=dtype)
    names = FileNames(lm)
    path, _ = decoder_layers(lm)
    lm.set_submodule(path, nn.ModuleList())
    fill(source, lm, device, names)
    return lm
