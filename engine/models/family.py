"""Encoder-decoders: which models are, and what cannot be combined with one.

All of it is in `config.json`. The Router asks and must not import torch, so neither does this file.
"""

import json

from engine.config import ModelConfig
from engine.drafting.registry import Method
from engine.errors import ModelError, ModelMismatchError
from engine.models.files import model_directory

T5_FAMILY = ("t5", "mt5", "umt5")
"""The encoder-decoders that are served, by their `model_type`."""


def is_encoder_decoder(config: ModelConfig) -> bool:
    """Return whether a model is an encoder-decoder that can be served.

    Raises:
        ModelError: there is no such model.
    """
    try:
        settings = json.loads((model_directory(config) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read a model configuration from {config.path}: {error}") from error
    return isinstance(settings, dict) and settings.get("model_type") in T5_FAMILY


def check_family(target: ModelConfig, draft: ModelConfig | None, method: Method) -> bool:
    """Check that an encoder-decoder has a draft of its kind, if any, and a drafting method that fits it.

    Returns:
        Whether the target is an encoder-decoder.

    Raises:
        ModelMismatchError: one of the two models is an encoder-decoder, the other is not.
        ModelError: there is no such model, or the method does not fit.
    """
    has_encoder = is_encoder_decoder(target)
    if draft is not None and is_encoder_decoder(draft) != has_encoder:
        kinds = ("an encoder-decoder", "decoder-only")
        target_kind, draft_kind = kinds if has_encoder else kinds[::-1]
        raise ModelMismatchError(
            f"the target {target.path} is {target_kind}, the draft {draft.path} is {draft_kind}; both must be of a kind"
        )
    if has_encoder and method.drafts_trees:
        raise ModelError(f"{target.path} is an encoder-decoder, whose attention goes by distance; it verifies no trees")
    if has_encoder and method.runs_in == "target":
        raise ModelError(f"{target.path} is an encoder-decoder; it cannot draft for itself")
    return has_encoder
