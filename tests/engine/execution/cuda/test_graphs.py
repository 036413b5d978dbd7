"""Which graph a batch runs on; that graphs compute what they should is tested on a GPU, in `test_backend`."""

import pytest
import torch

from engine.execution.attention import KVTensors
from engine.execution.batch import ForwardRow, build
from engine.models.layer_attention import KVShape

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.graphs import MAX_TOKENS, choose_shape
from engine.execution.cuda.static_pass import Shape

KV = KVTensors(KVShape(1, 1, 1, 1), 2, 16, torch.empty(0))
WIDTHS = (8, 4096)


def rows(count, length, start=20, num_blocks=2, parents=None):
    return [ForwardRow([1] * length, start, [1] * num_blocks, 1, parents)] * count


def draft(count, parents=None):
    return [ForwardRow([1] * (1 + count), 20, [1] * 6, 1 + count, parents)]


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (rows(1, 5), Shape(1, 5, 0, 8)),
        (rows(3, 4), Shape(4, 5, 0, 8)),
        (rows(1, 1), Shape(1, 2, 0, 8)),
        (rows(8, 1), Shape(8, 1, 0, 8)),
        (rows(1, 1, start=200, num_blocks=13), Shape(1, 2, 0, 4096)),
        (rows(1, 4, parents=[-1, 0, 0]), Shape(1, 5, 4, 8)),
        (draft(16) * 8, Shape(8, 24, 0, 8)),
        (draft(64, parents=[node // 4 - 1 for node in range(64)]), Shape(4, 24, 4, 8)),
    ],
)
def test_a_batch_runs_on_the_smallest_graph_that_holds_it(batch, shape):
    assert choose_shape(build(batch, KV), WIDTHS) == shape


@pytest.mark.parametrize(
    "batch",
    [
        rows(1, 40, num_blocks=4),
        [*rows(1, 5), *rows(1, 40, num_blocks=4)],
        rows(65, 1),
        rows(64, MAX_TOKENS // 64 + 1),
        rows(64, 3, start=4000, num_blocks=4000),
        rows(1, 1, start=70_000, num_blocks=4400),
    ],
    ids=["a prompt", "a prompt beside a chain", "rows", "tokens", "partial results", "context"],
)
def test_no_graph_is_as_large(batch):
    assert choose_shape(build(batch, KV), WIDTHS) is None
