"""Which models have linear layers, and their limits as drafts; the Router imports this, so no torch here."""

from collections.abc import Mapping

from engine.models.source import ModelKind


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
