"""How decoder-only models are served, and their limits as drafts; the Router imports this, so no torch here."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.families import refusal

if TYPE_CHECKING:
    from engine.models.causal_lm import CausalLM


class ModelKind:
    """How decoder-only models are served; other kinds derive from it.

    Attributes:
        refusals: why a feature is not served, by its name; draft_refusals: likewise for a model that drafts.
    """

    name = "decoder-only"
    refusals: Mapping[str, str] = {}
    draft_refusals: Mapping[str, str] = {}

    def check(self, config: ModelConfig, configuration: Any, generation_settings: Mapping[str, Any]) -> None:
        """Raise ModelError if the model's architecture cannot be served; other kinds check more."""
        if (reason := refusal(configuration, rolls_back=bool(self.draft_refusals))) is not None:
            raise ModelError(f"{config.path} is {reason}")

    def context_length(self, configuration: Any) -> int:
        """Return how many tokens a request may have, prompt and text together.

        As in vLLM, yarn multiplies the positions, and so does linear unless it is for some kinds of layers only: those
        configurations name the scaled length, as those with llama3 do. With longrope and dynamic, the original length
        is the limit: a longer text would change the frequencies of all tokens of its pass, also of other requests.
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
        """The class of loaded models."""
        from engine.models.causal_lm import CausalLM

        return CausalLM


class Hybrid(ModelKind):
    """Decoder-only models with linear layers, whose states cannot be cut as keys and values can."""

    draft_refusals: Mapping[str, str] = {
        "trees": "has linear layers, whose states go along a chain; drafting must not be one of trees",
        "run_ahead": "has linear layers, whose states cannot go on from several verdicts; run_ahead must be off",
    }


HYBRIDS = {
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
    *("bailing_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2", "lfm2", "lfm2_moe", "lfm3"),
}
"""The families that are served, by `model_type`: their layers hand the keywords of a pass on to their functions."""
KINDS = dict.fromkeys(HYBRIDS, Hybrid)
