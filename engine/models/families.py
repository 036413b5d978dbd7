"""Families: which architectures of transformers are served, and why others are not.

Rules decide: the task that transformers has an architecture for, its kinds of layers, and whether its attention can be
replaced. Names are for what no rule sees. `python -m tests.families` writes the table in deployments/README.md.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

ATTENDING = {"full_attention", "sliding_attention"}
KINDS: Mapping[str, str] = {
    "chunked_attention": "which attend in chunks, or by positions that they count themselves",
    "compressed_sparse_attention": "which attend to summaries of tokens, which cannot roll back",
    "heavily_compressed_attention": "which attend to summaries of tokens, which cannot roll back",
    "indexed_attention": "which choose tokens by keys that are not cached",
    "minimax_m3_sparse": "which choose tokens by keys that are not cached",
}
"""Why kinds of layers are not served."""
REFUSED: Mapping[str, str] = {
    "diffllama": "whose layers attend twice",
    "doge": "whose layers make masks of their own",
    "gemma4_assistant": "a draft that reads its target's keys and values",
    "gemma4_unified_assistant": "a draft that reads its target's keys and values",
    "hrm_text": "whose layers run several times for a token",
    "jetmoe": "whose attention is a mixture of experts",
    "moshi": "which reads and writes audio",
}
"""Why families are not served, by `model_type`, where no rule tells."""
_TEXT_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""The tasks, as transformers names them, of models that write text, and of models with a part that does."""


def refusal(configuration: Any) -> str | None:
    """Return why models with this configuration are not served, to be read after "it is"; None if they are."""
    from transformers import AutoModelForCausalLM

    from engine.models.layers.linear_layers import SERVED, WITH_STATE, WITHOUT_KV

    model_type = configuration.model_type
    if configuration.is_encoder_decoder:
        return f"{model_type}, an encoder-decoder of a family that is not served"
    if model_type in REFUSED:
        return f"{model_type}, {REFUSED[model_type]}"
    if type(configuration) not in AutoModelForCausalLM._model_mapping:
        return f"{model_type}, {_task(model_type)}"
    if hasattr(configuration, "is_decoder") and not hasattr(configuration, "rope_parameters"):
        return f"{model_type}, an encoder, whose tokens attend to later ones"
    layer_types = set(getattr(configuration, "layer_types", None) or [])
    for kind in sorted(layer_types - ATTENDING - WITH_STATE - WITHOUT_KV):
        return f"{model_type} with {kind} layers, {KINDS.get(kind, 'which are not known')}"
    architecture = AutoModelForCausalLM._model_mapping[type(configuration)]
    if model_type not in SERVED and (layer_types - ATTENDING or architecture._is_stateful):
        return f"{model_type}, whose linear layers do not pass on what the pass has to tell them"
    if not hasattr(sys.modules[architecture.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"{model_type}, whose attention cannot be replaced in transformers"
    return None


def _task(model_type: str) -> str:
    """Return what transformers has an architecture for that writes no text."""
    tasks = [task for task, names in _tasks().items() if model_type in names]
    if any(task in _TEXT_TASKS for task in tasks):
        return "whose text part has no causal language model in transformers"
    if tasks:
        return f"which transformers has for {tasks[0].replace('_', ' ').lower()}, not for text"
    return "which has no causal language model in transformers"


@functools.cache
def _tasks() -> Mapping[str, Mapping[str, str]]:
    """Return the architectures by model type, by task, as MASKED_LM."""
    from transformers.models.auto import modeling_auto

    prefix, suffix = "MODEL_FOR_", "_MAPPING_NAMES"
    names = (name for name in vars(modeling_auto) if name.startswith(prefix) and name.endswith(suffix))
    return {name.removeprefix(prefix).removesuffix(suffix): getattr(modeling_auto, name) for name in names}
