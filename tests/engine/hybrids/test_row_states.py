"""The states of linear layers: whatever the passes, drafts and rollbacks, they are those of the context alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.execution.batch import ForwardBatch, ForwardRow, build, next_tokens
from engine.execution.kv_tensors import KVTensors
from engine.hybrids.state_tensors import StateTensors
from engine.models.layers.layer_attention import KVShape
from engine.models.layers.layer_state import LayerStates, StateShape, Update, updated
from engine.protocols import SlotRow

CHUNK = 4
SHAPE = StateShape(channels=5, taps=2, heads=4, rows=3, columns=2, groups=2)
DEPTH = 6
VOCAB = 11
NUM_SLOTS = 8


class DeltaRule:
    """A gated delta rule whose chunk form differs from its steps by far more than by rounding."""

    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        key, value, decay = inputs
        seen = torch.einsum("nhrc,nhr->nhc", state, key)[:, ::2]
        return Update(decay, key, value - seen)

    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return torch.einsum("nhrc,nhr->nhc", state, inputs[0])

    def scan(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        outputs = []
        for first in range(0, len(inputs[0]), CHUNK):
            for token in range(first, min(first + CHUNK, len(inputs[0]))):
                entry = [part[token : token + 1] for part in inputs]
                state = updated(state[None], self.update(state[None], entry))[0] + 0.01 * (token - first)
                outputs.append(self.output(state[None], entry)[0])
        return torch.stack(outputs), state


class Layer:
    """A layer of one model: token ids in, numbers out that depend on the whole context."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        random_numbers = torch.Generator().manual_seed(0)

        def table(*shape: int) -> Tensor:
            return torch.randn(VOCAB, *shape, generator=random_numbers)

        self.inputs, self.key, self.value = table(5), table(4, 3), table(2, 2)
        self.decay = table(4, 1).sigmoid()
        self.weight, self.bias = torch.randn(5, 3, generator=random_numbers), torch.randn(5, generator=random_numbers)
        self.kv = KVTensors(KVShape(1, 1, 1, 1), 64, 16, torch.empty(0))
        model: Any = SimpleNamespace(device="cpu", dtype=torch.float32, state_shapes=[SHAPE])
        self.kv.extras = self.states = StateTensors(model, num_slots, DEPTH)

    @property
    def slots(self) -> LayerStates:
        return self.states.layers[0]

    def run(self, rows: Sequence[ForwardRow]) -> list[Tensor]:
        """The outputs of each row's tokens, [tokens, numbers]."""
        batch = build([replace(row, num_logits=len(row.token_ids)) for row in rows], self.kv)
        return list(torch.split(self.outputs(batch)[batch.logit_indices], [len(row.token_ids) for row in rows]))

    def outputs(self, batch: ForwardBatch) -> Tensor:
        convolved = self.states.of(batch.paged).convolve(0, self.inputs[batch.token_ids], self.weight, self.bias)
        key = self.key[batch.token_ids] + convolved[:, :4, None] / 10
        key = key / key.norm(dim=-1, keepdim=True)
        tokens = [key, self.value[batch.token_ids], self.decay[batch.token_ids]]
        return torch.cat([self.states.of(batch.paged).recur(0, DeltaRule(), tokens).flatten(1), convolved], 1)


def row(
    context: Sequence[int],
    start: int,
    prompt: int,
    state: SlotRow,
    draft: Sequence[int] = (),
    parents: Sequence[int] | None = None,
) -> ForwardRow:
    tokens, drafted = [*context[start:], *draft], {"num_draft_tokens": len(draft)}
    return ForwardRow(tokens, start, [1, 2, 3], 1, parents, prompt_length=prompt, slot=state, **drafted)


def alone(context: Sequence[int], prompt: int) -> Tensor:
    """The outputs of a context, the prompt in one pass and every later token in its own."""
    layer = Layer()
    outputs = layer.run([row(context[:prompt], 0, prompt, SlotRow(1, 0))])
    for end in range(prompt + 1, len(context) + 1):
        outputs += layer.run([row(context[:end], end - 1, prompt, SlotRow(1, 1))])
    return torch.cat(outputs)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@pytest.mark.parametrize("seed", range(20))
def test_outputs_depend_on_the_context_alone(seed: int) -> None:
    """Three requests, drafts of any length, of which any number is accepted, in any batches, saved and continued."""
    choose = random.Random(seed)
    contexts = [some_tokens(40, seed=10 * seed + i) for i in range(3)]
    prompts = [choose.randint(1, 21) for _ in contexts]
    expected = [alone(context, prompt) for context, prompt in zip(contexts, prompts, strict=True)]
    layer = Layer()
    for part in layer.slots.updates:
        part[1:] = float("nan")
    done, kept = [0] * 3, [0] * 3  # computed tokens, and the place of the state in the slot
    while min(done) < 40:
        rows, counts, ends = [], [], []
        for i in (order := choose.sample(left := [i for i in range(3) if done[i] < 40], choose.randint(1, len(left)))):
            context, prompt = contexts[i], prompts[i]
            end = done[i] + 1
            if done[i] < prompt:  # a row ends at a chunk's end, or with the prompt
                end = choose.choice([*range((done[i] // CHUNK + 1) * CHUNK, prompt, CHUNK), prompt])
            num_right = choose.randint(0, min(3, 40 - end)) if end >= prompt else 0
            draft = [*context[end : end + num_right], *some_tokens(choose.randint(0, 2))] if end >= prompt else []
            state = SlotRow(1 + i, 1 + i if done[i] else 0, done[i] - kept[i])
            rows.append(row(context[:end], done[i], prompt, state, draft))
            counts.append(end - done[i] + num_right)
            ends.append(end)
        for i, count, end, output in zip(order, counts, ends, layer.run(rows), strict=True):
            assert torch.equal(output[:count], expected[i][done[i] : done[i] + count])
            kept[i], done[i] = end, done[i] + count


def test_a_tree_is_each_of_its_paths() -> None:
    context, draft, parents = some_tokens(9), some_tokens(6, seed=5), [-1, 0, 0, 2, -1, 4]
    layer = Layer()
    (output,) = layer.run([row(context, 0, 8, SlotRow(1, 0), draft, parents)])
    for node in range(6):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.equal(output[9 + node], alone([*context, *(draft[i] for i in path)], 8)[-1])
    layer.states.keep_path(SlotRow(1, 1), [0, 2, 3])
    taken = [*context, draft[0], draft[2], draft[3], 7]
    (output,) = layer.run([row(taken, 12, 8, SlotRow(1, 1, 3))])
    assert torch.equal(output, alone(taken, 8)[-1:])


@pytest.mark.parametrize("place", [8, 12, 20, 22])
def test_a_saved_state_continues_at_its_place(place: int) -> None:
    """Places in the prompt, at its end, among folded tokens and at the tip."""
    prompt, context = 12, some_tokens(30)
    layer = Layer()
    saves = ((place, 2),)
    layer.run([row(context[:prompt], 0, prompt, SlotRow(1, 0, 0, saves if place <= prompt else ()))])
    layer.run([row(context[:13], 12, prompt, SlotRow(1, 1), context[13:19])])
    layer.run([row(context[:20], 19, prompt, SlotRow(1, 1, 6, saves if place == 20 else ()), context[20:26])])
    layer.run([row(context[:22], 21, prompt, SlotRow(1, 1, 1, saves if place == 22 else ()))])
    before = [part.clone() for part in (layer.slots.matrices, layer.slots.inputs)]
    expected = alone(context, prompt)
    (output,) = layer.run([row(context[: max(place, prompt) + 1], place, prompt, SlotRow(3, 2))])
    assert torch.equal(output, expected[place : max(place, prompt) + 1])
    assert torch.equal(layer.slots.matrices[2], before[0][2])
    assert torch.equal(layer.slots.inputs[2], before[1][2])


def test_carried_states_leave_slots_as_they_are() -> None:
    prompt, context, other = 6, some_tokens(20), some_tokens(30, seed=1)
    layer = Layer()
    layer.run([row(context[:6], 0, 6, SlotRow(1, 0)), row(other[:6], 0, 6, SlotRow(2, 0))])
    layer.run([row(context[:7], 6, 6, SlotRow(1, 1), context[7:10])])
    kept = layer.slots
    before = [part.clone() for part in (kept.matrices, kept.inputs, *kept.updates)]
    expected = [alone(context, prompt), alone(other, prompt)]
    # The second row is long: it comes last in the pass, and stays the second one of the draft.
    rows = [row(other[:26], 6, 6, SlotRow(2, 2)), row(context[:11], 9, 6, SlotRow(1, 1, 2))]
    batch = build(rows, layer.kv, carries=True)
    outputs = layer.outputs(batch)[batch.logit_indices]
    assert torch.equal(outputs, torch.stack([expected[1][25], expected[0][10]]))
    passes = next_tokens([[1, 2, 3]] * 2, [26, 11], 3, layer.kv, 64, batch.added)
    for step in range(3):
        outputs = layer.outputs(passes(step, torch.tensor([other[26 + step], context[11 + step]])))
        assert torch.equal(outputs, torch.stack([expected[1][26 + step], expected[0][11 + step]]))
    assert all(torch.equal(*pair) for pair in zip(before, (kept.matrices, kept.inputs, *kept.updates), strict=True))
