"""A T5 in a paged cache computes what transformers computes for one request at a time."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, MT5Config, T5Config, UMT5Config

from engine.execution.batch import ForwardRow, build
from tests.engine.tiny import T5_SIZES, backend_of, save

FAMILY = {
    "relu, scaled head": T5Config(**T5_SIZES),
    "gated, plain head": T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": MT5Config(**T5_SIZES | {"num_layers": 3, "num_decoder_layers": 1}),
    "umt5": UMT5Config(**T5_SIZES),
}
BLOCK = 4


@pytest.fixture(params=FAMILY)
def pair(request, tmp_path):
    """Our backend and transformers' module of the same model."""
    path = save(FAMILY[request.param], tmp_path, factor=2.0)
    if request.param == "gated, plain head":
        untie_head(path)
    module = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return backend_of(path), module


def untie_head(path):
    """Give a model a head of its own, as T5 v1.1 has."""
    model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(0.02 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(path)


def tokens(count, seed):
    return torch.randint(2, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(module, source_input, text):
    with torch.no_grad():
        return module(input_ids=torch.tensor([source_input]), decoder_input_ids=torch.tensor([text])).logits[0]


def table(index):
    """Twenty blocks of one request, in no order."""
    return [1 + 20 * index + (7 * i) % 20 for i in range(20)]


def test_rows_of_every_kind_get_transformers_logits(pair):
    """Inputs and texts of several lengths; one beyond the longest distance; chunks, drafts and padding in a pass."""
    backend, module = pair
    kv = backend.allocate_kv(101, BLOCK)
    inputs = [tokens(count, seed) for seed, count in enumerate((3, 9, 17, 1, 6))]
    texts = [[0, *tokens(count, 10 + seed)] for seed, count in enumerate((4, 40, 1, 0, 22))]
    done = [0, 33, 0, 0, 5]
    before = [i for i, count in enumerate(done) if count]
    backend.run(build([row(i, inputs[i], texts[i][: done[i]], 0, 0) for i in before], kv))
    rows = [row(i, inputs[i], texts[i], done[i], len(texts[i]) - done[i]) for i in range(5)]
    logits = backend.run(build(rows, kv)).logits.split([entry.num_logits for entry in rows])
    for i, actual in enumerate(logits):
        torch.testing.assert_close(actual, expected(module, inputs[i], texts[i])[done[i] :], atol=2e-4, rtol=2e-4)


def row(index, source_input, text, done, num_logits):
    context = [*source_input, *text]
    start = len(source_input) + done if done else 0
    return ForwardRow(context[start:], start, table(index), num_logits, input_length=len(source_input))


def test_an_input_alone_is_encoded_for_the_passes_after_it(pair):
    backend, module = pair
    kv = backend.allocate_kv(21, BLOCK)
    source_input, text = tokens(7, 1), [0, 5, 9]
    nothing = backend.run(build([row(0, source_input, [], 0, 0)], kv))
    assert (nothing.logits.shape, nothing.tokens.tolist()) == ((0, 64), [])
    later = ForwardRow(text, 7, table(0), 3, input_length=7)
    actual = backend.run(build([later], kv)).logits
    torch.testing.assert_close(actual, expected(module, source_input, text), atol=2e-4, rtol=2e-4)
