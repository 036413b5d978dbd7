"""Parameters as tensors shape logits bit by bit as `shape` does, and without reading a number on the host."""

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling import row_shaping
from engine.sampling.logits import Run, shape
from engine.sampling.row_shaping import RowShaping, shaped

VOCAB = 70
PARAMS = [
    {},
    {"temperature": 0},
    {"temperature": 0.6, "top_p": 0.5},
    {"temperature": 0, "top_p": 0.5, "top_k": 1},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 3.0, "top_k": VOCAB + 5, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "presence_penalty": 0.7, "frequency_penalty": -1.2, "temperature": 0},
    {"logit_bias": {4: 20.0, 6: -30.0}},
    {"min_tokens": 5, "stop_token_ids": [7]},
    {"min_tokens": 2, "logit_bias": {1: 50.0}, "presence_penalty": 1.0},
]
PROMPT, OUTPUT, DRAWN = [3, 4, 4, 60], [5, 5, 9], [9, 5, 61]
ENDS = (1, 2)


def requests_of(settings):
    params = [SamplingParams(max_tokens=50, **one) for one in settings]
    return [Request(str(i), PROMPT + OUTPUT[:-1], len(PROMPT), one) for i, one in enumerate(params)]


def shaping_of(settings):
    """One token of the output is a draft's."""
    return row_shaping.row_shaping(requests_of(settings), [OUTPUT[-1:]] * len(settings), ENDS, VOCAB)


@pytest.mark.parametrize("draw", [0, 1, 2, 3])
def test_rows_are_shaped_bit_by_bit_as_one_by_one(draw):
    rows, (places, added) = shaping_of(PARAMS)
    logits = 4 * torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(draw))
    logits[:, 20:24] = logits[:, 30:31]  # ties
    counts = torch.zeros(len(PARAMS), VOCAB, dtype=torch.int32)
    counts.view(-1).index_add_(0, places, added.int())
    for token in DRAWN[:draw]:
        counts[:, token] += 1
    runs = [
        Run(one, [1 + draw], [OUTPUT[-1:] + DRAWN[:draw]], (*ENDS, *one.params.stop_token_ids))
        for one in requests_of(PARAMS)
    ]
    expected = torch.cat([shape(row.clone().unsqueeze(0), [run]) for row, run in zip(logits, runs, strict=True)])
    before = logits.clone()
    assert torch.equal(shaped(logits, rows, counts, draw), expected)
    assert torch.equal(logits, before)


def test_nothing_is_read_on_the_host():
    """A graph would keep what the host read when it was recorded."""
    rows = RowShaping(*(part.to("meta") for part in shaping_of([{}] * 2)[0]))
    logits, counts = torch.empty(2, VOCAB, device="meta"), torch.empty(2, VOCAB, dtype=torch.int32, device="meta")
    assert shaped(logits, rows, counts, 1).shape == (2, VOCAB)


def test_ids_that_the_vocabulary_lacks_are_left_out():
    rows, _ = shaping_of([{"logit_bias": {VOCAB: 5.0}, "min_tokens": 5, "stop_token_ids": [VOCAB + 3]}])
    assert rows.biased_ids[rows.num_biased > 0].tolist() == list(ENDS)


def test_a_grammar_and_many_biases_have_no_tensors(monkeypatch):
    assert shaping_of([{"grammar": "start: /a/"}]) is None
    monkeypatch.setattr(row_shaping, "MAX_BIASED", 3)
    assert shaping_of([{"logit_bias": {4: 1.0}, "min_tokens": 5}]) is not None
    assert shaping_of([{"logit_bias": {4: 1.0, 5: 1.0}, "min_tokens": 5}]) is None
