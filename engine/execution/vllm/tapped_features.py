"""TappedFeatures: the features that a head on the draft worker reads, made of outputs of vLLM's layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.execution.kv_tensors import KVTensors
from engine.heads.registry import load_target
from engine.models.layers.layer_attention import KVShape
from engine.models.registry import open_model
from engine.models.source import ModelSource
from engine.protocols import VerifyRow


class TappedFeatures:
    """A feature per token in `kv`, a cache with the blocks of vLLM's and no layers; layers: see `Runner.tap`."""

    def __init__(self, source: ModelSource, num_blocks: int, block_size: int, like: Tensor) -> None:
        """Load what the head of a target computes features with; features have the dtype and the device of `like`.

        Raises ModelError if the head's files do not fit the target.
        """
        dtype: Any = str(like.dtype).removeprefix("torch.")
        config = replace(source.config, head_only=True, execution="torch", vllm={}, device="cpu", dtype=dtype)
        head: Any = load_target(open_model(config)).head
        head.embed_tokens = head.lm_head = head.layers = None  # the draft worker has them
        self._head = head.to(like.device)
        self.layers = sorted({*head.config.taps})
        none = KVShape(0, 0, 0, 0)
        self.kv = KVTensors(none, num_blocks, block_size, like, none, like.new_empty(head.state_size))

    def write(self, rows: Sequence[VerifyRow], outputs: Sequence[Tensor]) -> None:
        """Keep the features of rows that were computed; outputs: of each of `layers`, [tokens, width]."""
        ends = [row.start + row.length + len(row.draft.token_ids) for row in rows]
        places = [(row, place) for row, end in zip(rows, ends, strict=True) for place in range(row.start, end)]
        features = self._head.feature([outputs[self.layers.index(tap)] for tap in self._head.config.taps])
        states = self.kv.states
        assert states is not None
        slots = torch.tensor([self.kv.slot(row.block_ids, place) for row, place in places], device=states.device)
        states.flatten(0, 1).index_copy_(0, slots, features)
