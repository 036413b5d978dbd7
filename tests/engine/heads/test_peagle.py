"""P-EAGLE heads: a block is that of the formulas, and the text's own tokens keep their features."""

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.heads.head import head_model
from tests.engine.heads.test_dflash import computed, text_of
from tests.engine.heads.test_eagle3 import dense_logits
from tests.engine.heads.tiny_heads import VOCAB, backend_with_head, head_config, tapped, verify_row

MASK = 60
VARIANTS = {
    "plain": {"layers": 1, "norm_before_residual": True},
    "4 layers, draft vocabulary": {"layers": 4, "draft_vocab": 20},
    "normed taps, normed output": {"layers": 2, "fc_norm": True, "norm_output": True},
}


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_blocks_and_drafts_are_those_of_the_formulas(target_path, name):
    """Whatever was drafted and verified before: two rounds over the same cache."""
    config = head_config("peagle", mask_token_id=MASK, **VARIANTS[name])
    backend = backend_with_head(target_path, config)
    head, texts, counts = backend.model.head, [text_of(length, seed=length) for length in (2, 5, 12)], [4, 1, 3]
    head.mask_hidden.normal_(generator=torch.Generator().manual_seed(3))
    kv, tables = computed(backend, texts)
    beside, seen_kv = backend.beside(head_model, kv)
    ids = torch.arange(VOCAB) if head.target_ids is None else head.target_ids
    drafter = METHODS["head"].make_in_target(EngineConfig(), backend, kv, None)
    for _ in range(2):
        blocks = [[text[-1]] + [MASK] * (count - 1) for text, count in zip(texts, counts, strict=True)]
        rows = zip(blocks, texts, tables, counts, strict=True)
        logits = beside.run(
            build([ForwardRow(block, len(text) - 1, *rest) for block, text, *rest in rows], seen_kv)
        ).logits
        for text, block, row in zip(texts, blocks, logits.split(counts), strict=True):
            for depth in range(len(block)):
                masks = head.mask_hidden[0].expand(depth, -1).chunk(3, -1)
                taps = [torch.cat(pair) for pair in zip(tapped(backend, text[:-1]), masks, strict=True)]
                expected = dense_logits(head, taps, text + block[1 : depth + 1], [])
                torch.testing.assert_close(row[depth : depth + 1, ids], expected, atol=1e-4, rtol=0)
        drafted = [
            verify_row(text, count, first_block=t[0]) for text, count, t in zip(texts, counts, tables, strict=True)
        ]
        drafts = [row.draft.token_ids for row in drafter.draft(drafted, decides=True)]
        assert drafts == [row.argmax(-1).tolist() for row in logits.split(counts)]
        for text, table in zip(texts, tables, strict=True):
            verified = [text[-1], *text_of(2, seed=len(text))]
            backend.run(build([ForwardRow(verified, len(text) - 1, table, 1)], kv))
            text += [verified[1], 8]


@torch.inference_mode()
def test_a_text_with_the_masks_token_keeps_its_own_features(target_path):
    config = head_config("peagle", mask_token_id=MASK)
    backend, written = backend_with_head(target_path, config), []
    for value in (0.0, 1.0):
        backend.model.head.mask_hidden.fill_(value)
        written.append(computed(backend, [[5, MASK, 7, MASK, 9]])[0])
    for one, other in zip(*(kv.added for kv in written), strict=True):
        assert torch.equal(one, other)
