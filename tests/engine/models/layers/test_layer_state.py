"""The sizes of states and their updates."""

import torch

from engine.models.layers.layer_state import StateShape, Update, updated


def test_an_update_decays_a_state_and_adds_a_product() -> None:
    state = torch.randn(2, 4, 3, 5)
    decay, left, right = torch.rand(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 2, 5)
    after = updated(state, Update(decay, left, right))
    for row in range(2):
        for head in range(4):
            expected = decay[row, head, :, None] * state[row, head] + torch.outer(
                left[row, head], right[row, head // 2]
            )
            torch.testing.assert_close(after[row, head], expected)


def test_the_bytes_of_a_slot() -> None:
    short_convolution = StateShape(channels=10, taps=2)
    assert short_convolution.num_bytes(depth=3, itemsize=2) == 2 * 10 * (2 + 3)
    shape = StateShape(channels=0, taps=0, heads=4, rows=3, columns=5, groups=2, decays=3)
    assert shape.num_bytes(depth=2, itemsize=2) == 4 * (4 * 3 * 5 + 2 * (4 * 3 + 4 * 3 + 2 * 5))
