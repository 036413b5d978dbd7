"""Loads a head's weights under the names of `speculators`, whichever form its files have.

What a file does not have and a head does not compute without, its embedding and its last layer, is the target's.
"""

import logging
import re
from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from engine.errors import ModelError
from engine.models.heads.config import HeadConfig, read_head_config
from engine.models.heads.head import Head
from engine.models.heads.registry import HEADS
from engine.models.source import ModelSource

logger = logging.getLogger(__name__)

_RENAMINGS = (
    (r"^model\.", ""),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^encoder\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^additional_layers\.(\d+)\.hidden_norm\.", r"additional_layers.\1.input_layernorm."),
    (r"^additional_layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}."),
)
"""What names in authors' forms are called."""
_DROPPED = re.compile(r"verifier_(lm_head|norm)\.|confidence_head\.|.*\.inv_freq$")
"""Tensors that only training reads, and a confidence that is not used: acceptance is measured."""
