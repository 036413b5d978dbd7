"""HeadConfig: what a trained head is made of."""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head's files say about it.

    Attributes:
        kind: a name in `engine.heads.registry.HEADS`.
        layers: the configuration of the head's own layers, as of a model of transformers.
        taps: the target's layers whose outputs the head reads, each by the number of layers up to it, in the order of
            the columns of `fc`.
        vocab_size: the target's; draft_vocab_size: the tokens that the head can draft.
        target_hidden_size: the width of the outputs that it reads.
    """

    kind: str
    layers: PreTrainedConfig
    taps: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    block_size: int = 0
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
