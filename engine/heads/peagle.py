"""P-EAGLE (arXiv:2602.01469): an EAGLE-3 head that drafts several tokens in one pass, with masks for earlier drafts."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from engine.heads.config import HeadConfig
from engine.heads.eagle3 import Eagle3Head
from engine.heads.head import HeadOutput
from engine.models.layers.layer_attention import AttentionContext


class PEagleHead(Eagle3Head):
    """Drafts a block: the last committed token, then masks with a learned feature; all places attend causally."""

    drafts_blocks: ClassVar[bool] = True
    num_unread: ClassVar[int] = 0
    markov_head: ClassVar[None] = None

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module, lm_head: nn.Module, first_layer: int) -> None:
        super().__init__(config, embed_tokens, lm_head, first_layer)
        assert config.mask_token_id is not None
        self._mask_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(config.taps) * config.target_hidden_size))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged: AttentionContext, **_: object
    ) -> HeadOutput:
        if not len(logits_to_keep):
            return self.absorbed(input_ids, position_ids, paged)
        return super().forward(input_ids, position_ids, logits_to_keep, paged)

    def _drafting_inputs(self, token_ids: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        embedded, states = self._inputs(token_ids, context)  # a text that has the mask's id keeps its own features
        mask = self.feature(self.mask_hidden.chunk(len(self.config.taps), -1))
        return embedded, torch.where(token_ids.eq(self._mask_id).unsqueeze(-1), mask, states)
