"""Families: reads configurations, and decides which of transformers' architectures are served.

An architecture's task, its kinds of layers and its attention decide; names are listed only where these do not tell.
`python -m tests.families` writes the table in deployments/docs/families.md.
"""

import functools
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.files import damage_named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.models.causal_lm import CausalLM

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
KINDS: Mapping[str, str] = {
    "compressed_sparse_attention": "which attend to summaries of tokens, which cannot roll back",
    "heavily_compressed_attention": "which attend to summaries of tokens, which cannot roll back",
    "indexed_attention": "which choose tokens by keys that are not cached",
    "minimax_m3_sparse": "which choose tokens by keys that are not cached",
}
"""Kinds of layers that are not served, and why."""
REFUSED: Mapping[str, str] = {
    "diffllama": "whose layers attend twice",
    "doge": "whose layers make masks of their own",
    "gemma4_assistant": "a draft that reads its target's keys and values",
    "gemma4_unified_assistant": "a draft that reads its target's keys and values",
    "hrm_text": "whose layers run several times for a token",
    "jetmoe": "whose attention is a mixture of experts",
    "mimo_v2_flash": "whose layers differ in their heads, each with numbers of its own",
    "nemotron": "whose layers do not pass keyword arguments on to their attention",
    "stablelm": "whose layers do not pass keyword arguments on to their attention",
    "moshi": "which reads and writes audio",
}
"""Families, by `model_type`, that are not served for reasons that no rule sees."""
_ONLY_CHAINS = (
    "computed by vLLM, where drafts are chains from elsewhere; drafting must be model, head_worker, ngram, "
    "suffix or model+suffix, or execution torch"
)
_TEXT_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""transformers' tasks of models that write text, alone or with a part of the model."""
_GGUF_SCALING = (b".rope.scaling.", b"rope_freqs.weight", b"rope_factors_")
"""Fields and tensors of GGUF files that scale positions; transformers reads none of them."""


def read_configuration(path: str, settings: dict[str, Any]) -> "PreTrainedConfig":
    """Return the configuration for these settings; raise ModelError if they cannot be read."""
    import transformers
    from transformers import CONFIG_MAPPING

    model_type: str = settings.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        hint = "; the code of a repository (auto_map) is never run" if "auto_map" in settings else ""
        known = f"transformers {transformers.__version__} has no model_type {model_type!r}"
        raise ModelError(f"cannot read a model configuration from {path}: {known}{hint}")
    with damage_named(f"a model configuration from {path}", "correct its config.json, or download it again"):
        configuration: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(settings)
    return configuration


def gguf_settings(file: Path) -> dict[str, Any]:
    """Return the config.json that transformers makes of a GGUF file's fields."""
    from transformers import PreTrainedConfig

    hint = "the original model's config.json and tokenizer.json belong beside it"
    with file.open("rb") as opened:
        header = opened.read(2**26)
    if any(mark in header for mark in _GGUF_SCALING):
        raise ModelError(f"{file} scales positions, which transformers does not read there; {hint}")
    try:
        settings, _ = PreTrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, IndexError, ImportError, struct.error) as error:
        raise ModelError(f"cannot read a model configuration from {file}: {error}; {hint}") from error
    return dict(settings)


def text_part(whole: Any) -> Any:
    """Return the configuration of the text model inside a multimodal model, where transformers has it by itself."""
    from engine.models.causal_lm import CausalLM

    is_listed = any(whole.model_type in _tasks().get(task, {}) for task in _TEXT_TASKS)
    if whole.is_encoder_decoder or whole.model_type in REFUSED or not is_listed:
        return whole
    text = whole.get_text_config()
    if text.is_encoder_decoder or type(text) not in CausalLM.loaded_by._model_mapping:
        return whole
    if (settings := getattr(whole, "quantization_config", None)) is not None:
        text.quantization_config = settings
    return text


def refusal(configuration: Any, *, rolls_back: bool) -> str | None:
    """Return why models with this configuration are not served, to be read after "it is"; None if they are.

    rolls_back: whether the states of linear layers can be rolled back.
    """
    from engine.models.causal_lm import CausalLM

    model_type, architectures = configuration.model_type, CausalLM.loaded_by._model_mapping
    if configuration.is_encoder_decoder:
        return f"{model_type}, an encoder-decoder of a family that is not served; T5, mT5 and umT5 are"
    if model_type in REFUSED:
        return f"{model_type}, {REFUSED[model_type]}"
    if type(configuration) not in architectures or configuration.sub_configs.keys() - {"attn_config", "ffn_config"}:
        return f"{model_type}, {_task(model_type)}"
    if hasattr(configuration, "is_decoder") and not hasattr(configuration, "rope_parameters"):
        return f"{model_type}, an encoder, whose tokens attend to later ones"
    layer_types = set(getattr(configuration, "layer_types", None) or [])
    for kind in sorted(layer_types & KINDS.keys()):
        return f"{model_type} with {kind} layers, {KINDS[kind]}"
    architecture: Any = architectures[type(configuration)]
    if not rolls_back and (layer_types - ATTENDING or architecture._is_stateful):
        return f"{model_type}, whose layers keep a state that cannot be rolled back"
    if others := (configuration.per_layer_attributes or set()) - {"head_dim", "num_key_value_heads"}:
        return f"{model_type}, whose layers differ in their {', '.join(sorted(others))}"
    if getattr(configuration, "use_bidirectional_attention", None) in (True, "all"):
        return f"{model_type} with use_bidirectional_attention, so it writes no text token by token"
    if not hasattr(sys.modules[architecture.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"{model_type}, whose attention cannot be replaced in transformers"
    return None


class ModelKind:
    """How decoder-only models are served; `refusals` and, of drafts, `draft_refusals` say why a feature is not."""

    name = "decoder-only"
    refusals: Mapping[str, str] = {}
    draft_refusals: Mapping[str, str] = {}

    def check(self, config: ModelConfig, configuration: Any, generation_settings: Mapping[str, Any]) -> None:
        """Raise ModelError if the model's architecture cannot be served; other kinds check more."""
        if (reason := refusal(configuration, rolls_back=bool(self.draft_refusals))) is not None:
            raise ModelError(f"{config.path} is {reason}")

    def context_length(self, configuration: Any) -> int:
        """Return how many tokens a request may have, prompt and text together.

        As in vLLM, yarn multiplies `max_position_embeddings`, and so does linear scaling if it holds for all layers.
        Other configurations already name the scaled length. With longrope and dynamic scaling the original length is
        the limit: a longer text would change the frequencies of all tokens in its pass, including other requests'.
        """
        text = configuration.get_text_config()
        rope = (hasattr(type(text), "rope_parameters") and text.rope_parameters) or {}
        longest: int = text.max_position_embeddings
        by_kind = [scaling for scaling in rope.values() if isinstance(scaling, dict)]
        lengths, lengthens = [], {"yarn"} if by_kind else {"yarn", "linear"}
        for scaling in by_kind or [rope]:
            original, factor = scaling.get("original_max_position_embeddings") or longest, scaling.get("factor")
            if scaling.get("rope_type") == "longrope":
                lengths.append(original)
            elif scaling.get("rope_type") in lengthens and factor:
                lengths.append(original * factor)
        return int(min(lengths, default=longest))

    def start_id(self, settings: Mapping[str, Any], generation_settings: Mapping[str, Any]) -> int | None:
        """Return the token that a text starts with after its prompt; None for decoder-only models."""
        return None

    @property
    def model_class(self) -> "type[CausalLM]":
        from engine.models.causal_lm import CausalLM

        return CausalLM


class ServedByVllm(ModelKind):
    """Decoder-only models that vLLM computes; its registry, which a worker reads, decides which of them it has."""

    refusals: Mapping[str, str] = dict.fromkeys(("trees", "self-drafts"), _ONLY_CHAINS)

    def check(self, config: ModelConfig, configuration: Any, generation_settings: Mapping[str, Any]) -> None:
        """Raise ModelError for what vLLM's part of a round cannot compute."""
        from engine.models.causal_lm import CausalLM

        text, architectures = configuration.get_text_config(), CausalLM.loaded_by._model_mapping
        is_stateful = type(text) in architectures and architectures[type(text)]._is_stateful
        use_torch = "which execution=vllm does not serve; execution must be torch"
        if configuration.is_encoder_decoder:
            raise ModelError(f"{config.path} is {configuration.model_type}, an encoder-decoder, {use_torch}")
        if is_stateful or set(getattr(text, "layer_types", None) or []) - ATTENDING:
            raise ModelError(f"{config.path} is {configuration.model_type} with layers that keep a state, {use_torch}")
        if (getattr(configuration, "quantization_config", None) or {}).get("quant_method") == "gguf":
            raise ModelError(f"{config.path} is a GGUF file, {use_torch}")
        if config.quantization == "int4":
            problem = "target_quantization is int4, which vLLM does not round to at load"
            raise ModelError(f"{problem}; serve a checkpoint that is saved in int4, or set execution to torch")


def logit_scale(text: "PreTrainedConfig") -> float:
    """Return the factor of a model's logits; all families but hyperclovax divide by their `logits_scaling`."""
    factor = float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1)
    scaling = float(getattr(text, "logits_scaling", None) or 1)
    return factor * (scaling if text.model_type == "hyperclovax" else 1 / scaling)


def keep_layers(configuration: "PreTrainedConfig", count: int) -> None:
    """Cut a configuration down to the first `count` layers."""
    text = configuration.get_text_config()
    if shared := getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = max(0, count - (text.num_hidden_layers - shared))
    text.num_hidden_layers = count
    if text.num_hidden_layers != count:  # some count the kinds of their layers
        text.layer_types = text.layer_types[:count]


def _task(model_type: str) -> str:
    """Return the clause of a message that says for which other task transformers has this model."""
    tasks = [task for task, names in _tasks().items() if model_type in names and task != "PRETRAINING"]
    if any(task in _TEXT_TASKS for task in tasks):
        return "whose text part has no causal language model of its own in transformers"
    name = tasks[0].replace("_", " ").lower().replace(" lm", " language modelling") if tasks else None
    return f"which has no causal language model in transformers{f', but one for {name}' if name else ''}"


@functools.cache
def _tasks() -> Mapping[str, Mapping[str, str]]:
    """Return class names of transformers' architectures by task, such as MASKED_LM, and model type."""
    from transformers.models.auto import modeling_auto

    prefix, suffix = "MODEL_FOR_", "_MAPPING_NAMES"
    names = (name for name in vars(modeling_auto) if name.startswith(prefix) and name.endswith(suffix))
    return {name.removeprefix(prefix).removesuffix(suffix): getattr(modeling_auto, name) for name in names}
