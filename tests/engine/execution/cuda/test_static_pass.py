"""A static pass, computed on the CPU with interpreted kernels, gives what an eager pass gives, padding or not."""

import pytest
import torch
from transformers import LlamaConfig

from engine.execution.batch import ForwardRow, build, next_tokens
from engine.execution.eager import EagerBackend
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.sampling import noise
from engine.sampling.noise import Draws
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.tiny import SIZES, model_of, save

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.static_pass import Outputs, Shape, Staging, StaticPass

CPU = torch.device("cpu")
BLOCKS = [*range(1, 12)]
BATCHES = {
    "a chain": [ForwardRow([11, 12, 13, 14, 15], 40, BLOCKS, 5)],
    "one token": [ForwardRow([11], 40, BLOCKS, 1)],
    "rows of different lengths": [ForwardRow([3] * 4, 5, [12], 2), ForwardRow([5, 6], 20, [13, 14], 1)],
    "a tree": [ForwardRow([3] * 4, 5, [12], 4, [-1, -1, 1]), ForwardRow([5, 6], 20, [13, 14], 2)],
}
PROMPTS = {
    "beside chains": [
        ForwardRow([3, 4, 5], 20, [1, 2], 3),
        ForwardRow(list(range(3, 23)), 9, [4, 5], 1),
        ForwardRow([7], 3, [6], 1),
        ForwardRow(list(range(9, 27)), 0, [3, 7], 1),
    ]
}
"""They take several rows of a graph, whose lengths are the draft's."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    return EagerBackend(model_of(save(LlamaConfig(**SIZES), tmp_path_factory.mktemp("model"), factor=3.0)))


def prefilled(backend, seed):
    kv = backend.allocate_kv(20, 16)
    generator = torch.Generator().manual_seed(seed)
    for cache in (*kv.keys, *kv.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return kv


def static_pass(backend, kv, shape, width=12):
    vocab = backend.model.info.vocab_size
    outputs = Outputs(torch.empty(64, vocab), torch.empty(64, dtype=torch.int64))
    return StaticPass(backend.model, kv, width, shape, outputs)


def draws_for(count):
    """The first row is greedy, and two rows share a key."""
    keys = noise.keys(range(max(count - 2, 1)), range(max(count - 2, 1)), noise.TARGET_STREAM, CPU)
    rows = torch.tensor([0, *range(1, count)]).clamp(max=len(keys))
    return Draws(torch.linspace(1.0, 0.5, count).unsqueeze(-1), keys, rows)


def assert_same(one, kv, other_kv, static, rows, draws=None):
    """Compute rows by a static pass and an eager one, which leave the same; return both outputs."""
    batch, other_batch = build(rows, kv), build(rows, other_kv)
    draws = draws and draws(len(batch.logit_indices))
    static.fill(batch, draws)
    static.compute()
    output, right = static.output(batch, draws), one.run(other_batch, draws)
    torch.testing.assert_close(output.logits, right.logits, atol=2e-4, rtol=0)
    torch.testing.assert_close(output.scores, right.scores, atol=2e-4, rtol=0)
    assert torch.equal(output.tokens, output.scores.argmax(-1))
    return batch, draws, output


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "batches", "drawn"),
    [
        (Shape(1, 5, 3), {"a chain": BATCHES["a chain"]}, (0,)),
        (Shape(3, 6, 4), BATCHES, (1, 0, 1, 1)),
        (Shape(16, 3, 0), PROMPTS, (1,)),
    ],
)
def test_a_static_pass_gives_what_an_eager_pass_gives(backend, shape, batches, drawn):
    """One batch after the other, so that remains of the last would show; logits only if a batch needs them."""
    kv, other_kv = prefilled(backend, 1), prefilled(backend, 1)
    static = static_pass(backend, kv, shape)
    for rows, is_drawn in zip(batches.values(), drawn, strict=True):
        batch, draws, output = assert_same(backend, kv, other_kv, static, rows, draws_for if is_drawn else None)
        for cache, other in zip((*kv.keys, *kv.values), (*other_kv.keys, *other_kv.values), strict=True):
            torch.testing.assert_close(cache[1:], other[1:], atol=2e-4, rtol=0)
        batch.needs_logits = False
        again = static.output(batch, draws)
        assert torch.equal(again.tokens, output.tokens)
        assert (len(again.logits), len(again.scores)) == (0, 0)


@torch.inference_mode()
def test_results_stay_when_the_next_pass_is_computed(backend):
    kv = prefilled(backend, 1)
    static = static_pass(backend, kv, Shape(1, 2, 0))
    batch = next_tokens([BLOCKS], [40], 2, kv, 1000)
    first_batch = batch(0, torch.tensor([11]))
    static.fill(first_batch, None)
    static.compute()
    first = static.output(first_batch, None)
    before = first.logits.clone()
    static.fill(batch(1, first.tokens), None)
    static.compute()
    assert torch.equal(first.logits, before)
    assert not torch.equal(static.output(first_batch, None).logits, before)


PADDED = [[ForwardRow([11], 40, BLOCKS, 1)], [ForwardRow([3, 9, 4], 40, BLOCKS, 1)]]
TREE = [[ForwardRow([3] * 5, 5, [12], 4, [-1, -1, 1, 2]), ForwardRow([5, 6], 20, [13, 14], 1)]]
BLOCK_ROWS = [
    [ForwardRow([11, *[60] * 4], 40, BLOCKS, 4), ForwardRow([3, 60, 60], 20, [13, 14], 2)],
    [ForwardRow([7, 60], 17, [13, 14], 1)],
]
DFLASH = block_config(["sliding_attention", "full_attention"])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("config", "of_target", "shape", "batches"),
    [
        (head_config(), True, Shape(3, 6, 0), PADDED),
        (head_config(), False, Shape(3, 6, 4), TREE),
        (DFLASH, False, Shape(3, 9, 0), BLOCK_ROWS),
    ],
    ids=["a target with a head", "the head", "dflash"],
)
def test_a_static_pass_keeps_for_a_head_what_an_eager_pass_keeps(config, of_target, shape, batches, backend):
    """No padding writes the state of a token. Blocks of 5 and 3 tokens in passes for 9 do not see it."""
    model = with_head(backend.model, random_head(backend.model, config))
    one = EagerBackend(model if of_target else head_model(model))
    kv, other_kv = prefilled(one, 1), prefilled(one, 1)
    other_kv.states.copy_(kv.states.normal_())
    static = static_pass(one, kv, shape)
    for rows in batches:
        assert_same(one, kv, other_kv, static, rows)
        for cache, other in zip(kv.added, other_kv.added, strict=True):
            if batches is not BLOCK_ROWS:  # in which padding writes keys that nobody reads
                torch.testing.assert_close(cache[:, 1:], other[:, 1:], atol=2e-4, rtol=0)


class LateDevice:
    """A device tensor and an event of a stream that copies only when the host waits for it."""

    def __init__(self):
        self.pending, self.received = [], []

    def copy_(self, packed, *, non_blocking):
        assert non_blocking
        self.pending.append(packed)

    def record(self):
        assert self.pending  # after the copy

    def synchronize(self):
        self.received += [packed.tolist() for packed in self.pending]
        self.pending = []


def test_a_staging_buffer_is_not_overwritten_while_it_is_copied(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    device, template = LateDevice(), torch.zeros(4, dtype=torch.int32)
    staging = Staging(template, device)
    for number in range(1, 4):
        packed = staging.begin(template[:3])
        packed[0] = number
        staging.send(packed, device)
    device.synchronize()
    assert device.received == [[1, 0, 0], [2, 0, 0], [3, 0, 0]]
