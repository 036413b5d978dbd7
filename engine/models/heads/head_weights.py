"""Loads a head under the names of `speculators`, whichever form its files have; what they lack is the target's."""

import logging
import re
from typing import Any

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

_RENAMINGS = {
    r"^model\.": "",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^(encoder|midlayer)\.": lambda match: {"encoder": "", "midlayer": "layers.0."}[match[1]],
    r"^(additional_layers\.\d+)\.hidden_norm\.": r"\1.input_layernorm.",
    r"^additional_layers\.(\d+)\.": lambda match: f"layers.{int(match[1]) + 1}.",
    r"^draft_id_to_target_id$": "d2t",
}
"""Names in the forms of authors, in the order in which they are replaced."""
_NOT_READ = re.compile(r"(verifier_(lm_head|norm)|confidence_head)\.|.*\.inv_freq$")
"""Tensors that only training reads, and DSpark's confidence: what is accepted is measured instead."""
_SHARED = ("embed_tokens.weight", "lm_head.weight")


def load_head(
    source: ModelSource, target: ModelSource, lm: nn.Module, device: torch.device, dtype: torch.dtype, first_layer: int
) -> Head:
    """Load a head.

    Args:
        lm: the target's module, whose embedding and last layer a head shares if its files have none.
        first_layer: the index of its first layer in the cache.

    Raises:
        ModelError: it does not fit the target, or its files lack a tensor or have one that is unknown or of another
            shape.
    """
    config = read_head_config(source, target)
    tensors = _tensors(source)
    ids = _target_ids(source, config, tensors.pop("d2t", None), tensors.pop("t2d", None))
    given: Any = lm
    embedding, last = given.get_input_embeddings(), given.get_output_embeddings()
    hidden, own = config.layers.hidden_size, [name for name in _SHARED if name in tensors]
    shapes = {"embed_tokens.weight": (config.vocab_size, hidden), "lm_head.weight": (config.draft_vocab_size, hidden)}
    for name, shape in shapes.items():
        if name not in own and shape != (config.vocab_size, config.target_hidden_size):
            raise ModelError(f"the head {source.path} lacks {name}, {[*shape]}; that of its target has another shape")
    with no_init_weights():
        # Only the weight, because some targets scale what they embed, and heads are trained without.
        embed_tokens = nn.Embedding(*shapes["embed_tokens.weight"])
        if "embed_tokens.weight" not in own:
            embed_tokens.weight = embedding.weight
        lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if "lm_head.weight" in own else last
        head = HEADS[config.kind](config, embed_tokens, lm_head, first_layer)
    wanted = {name: tensor for name, tensor in head.state_dict().items() if name not in _SHARED or name in own}
    ...
    return head
