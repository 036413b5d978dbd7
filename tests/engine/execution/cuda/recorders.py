"""A recorder that needs no GPU."""

import torch

from engine.config import EngineConfig, ModelConfig

ENGINE = EngineConfig(num_speculative_tokens=1, max_num_seqs=2, max_num_batched_tokens=40, max_model_len=64)
SETTINGS = ModelConfig("tiny", compile="auto")


class CallRecorder:
    """Replays a pass by computing it; recording the passes in `full`, counted from 0, fails for lack of memory."""

    def __init__(self, full=(), *, is_warm=False):
        self.full, self.is_warm = full, is_warm
        self.computes = []
        self.num_replays = 0

    def record(self, compute):
        self.computes.append(compute)
        if len(self.computes) - 1 in self.full:
            raise torch.OutOfMemoryError("no memory is left")
        if not self.is_warm:
            compute()

        def replay():
            self.num_replays += 1
            compute()

        return replay

    def close(self):
        self.computes.clear()
