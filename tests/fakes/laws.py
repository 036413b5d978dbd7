"""Models whose law is known or sharp, and a byte tokenizer."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import ModelInfo
from engine.execution.backend import Part, PassOutput
from engine.execution.batch import ForwardBatch
from engine.execution.kv_tensors import KVTensors
from engine.models.causal_lm import Reducer
from engine.models.layers.layer_attention import AttentionParams, KVShape
from engine.sampling import noise


def sharpen(model: torch.nn.Module, noise: float = 0.0) -> None:
    """Make a random model's distributions sharp: weights as initialised would make every token alike.

    Args:
        noise: added to the weights at random, so that two models of the same seed agree only nearly.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
                if noise:
                    parameter.add_(torch.randn_like(parameter) * noise)


class LawBackend:
    """A backend whose logits are a law that is written down; subclasses give `logits` and `allocate_kv`.

    It returns tokens only where the batch needs no logits.
    """

    device = torch.device("cpu")
    reducer: Reducer | None = None
    model = SimpleNamespace(drafts_blocks=False, attends_from=0)

    def run(self, batch: ForwardBatch, draws: noise.Draws | None = None) -> PassOutput:
        logits = self.logits(batch)
        scores = logits if draws is None else noise.noised_logits(logits, draws)
        kept = len(logits) if batch.needs_logits else 0
        return PassOutput(logits[:kept], scores[:kept], scores.argmax(-1))

    def wait(self) -> None:
        pass

    def plan_chains(self, num_steps: int, num_ranked: int) -> bool:
        return False

    @property
    def is_busy(self) -> bool:
        return False

    def warm_up(self, *, compile_missing: bool = True) -> None:
        pass


class LateModel:
    """A model whose passes end later, as on a GPU: what is read before `wait` is wrong, what passes use is right.

    A pass is also over once `is_busy` was looked at twice. `num_under_way` is the most passes that were under way.
    """

    def __init__(self, model: LawBackend) -> None:
        self._model = model
        self._launched: list[tuple[ForwardBatch, noise.Draws | None, PassOutput]] = []
        self._num_looks = 0
        self.num_under_way = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, batch: ForwardBatch, draws: noise.Draws | None = None) -> PassOutput:
        num_logits, vocab = len(batch.logit_indices), self._model.info.vocab_size
        wrong = torch.arange(vocab, dtype=torch.float32).expand(num_logits if batch.needs_logits else 0, vocab)
        output = PassOutput(wrong.clone(), wrong.clone(), torch.full((num_logits,), vocab - 1))
        self._launched.append((batch, draws, output))
        self.num_under_way = max(self.num_under_way, len(self._launched))
        self._num_looks = 0
        return output

    @torch.inference_mode()
    def wait(self) -> None:
        for batch, draws, output in self._launched:
            for late, right in zip(output, self._model.run(batch, draws), strict=True):
                late.copy_(right)
        self._launched.clear()

    @property
    def is_busy(self) -> bool:
        self._num_looks += 1
        if self._num_looks > 2:
            self.wait()
        return bool(self._launched)


class MarkovModel(LawBackend):
    """A model in which the next token depends on the last one only: its joint law can be written down."""

    def __init__(self, transitions: torch.Tensor, eos_token_ids: Sequence[int] = ()) -> None:
        self.transitions = transitions
        vocab = transitions.shape[0]
        self.info = ModelInfo("markov", vocab, 4096, list(eos_token_ids), vocab * vocab, "float32", "cpu")

    def allocate_kv(self, num_blocks: int, block_size: int, num_states: int = 0, depth: int = 0) -> KVTensors:
        return KVTensors(KVShape(1, 1, 1, 1), num_blocks, block_size, torch.empty(0))

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        return self.transitions[batch.token_ids[batch.logit_indices]].log()


class ContextModel(LawBackend):
    """A model in which the next token depends on every token that attention lets it see, and on where each stands.

    What it reads comes out of the KV blocks, through the batch's own masks: an entry that is missing, stale or somebody
    else's changes the state, and with it the law. Integers only, so no rounding stands between two runs.
    """

    def __init__(self, laws: torch.Tensor, eos_token_ids: Sequence[int] = ()) -> None:
        self.laws = laws
        states, vocab = laws.shape
        self.info = ModelInfo("context", vocab, 4096, list(eos_token_ids), states * vocab, "float32", "cpu")

    def allocate_kv(self, num_blocks: int, block_size: int, num_states: int = 0, depth: int = 0) -> KVTensors:
        return KVTensors(KVShape(1, 1, 1, 1), num_blocks, block_size, torch.empty(0, dtype=torch.int64))

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        paged = batch.paged
        entries = paged.kv.keys[0]
        entries.view(-1)[paged.slots] = self._entry(batch.token_ids, batch.positions)
        states = []
        for group in paged.groups:
            context = entries.index_select(0, group.blocks.flatten()).view(group.rows, 1, -1)
            visible = group.mask(AttentionParams(), 1, torch.empty(0), paged.kv.block_size).squeeze(1) == 0
            states.append(self._states(visible * context).flatten())
        return self.laws[torch.cat(states)[batch.logit_indices]].log()

    def law(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the law of the token after `token_ids`, [vocab]."""
        tokens = torch.tensor(token_ids)
        return self.laws[self._entry(tokens, torch.arange(len(tokens))).sum() % len(self.laws)]

    def _states(self, seen: torch.Tensor) -> torch.Tensor:
        return seen.sum(-1) % len(self.laws)

    def _entry(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (token_ids + 1) * (3 * positions**2 + 1)


FOREIGN = 10**9
"""More than any entry of a context model."""


class SelfDraftingModel(ContextModel):
    """A context model of two layers whose first one drafts for it, by other laws, over the same entries.

    What the thinned model computes, it writes as foreign entries, which only it can read: if the whole model sees one,
    it sees a token that not all of its layers have computed.
    """

    def __init__(self, laws: torch.Tensor, thinned_laws: torch.Tensor, eos_token_ids: Sequence[int] = ()) -> None:
        super().__init__(laws, eos_token_ids)
        self.thinned = ThinnedModel(thinned_laws, eos_token_ids)

    def allocate_kv(self, num_blocks: int, block_size: int, num_states: int = 0, depth: int = 0) -> KVTensors:
        return KVTensors(KVShape(2, 1, 1, 1), num_blocks, block_size, torch.empty(0, dtype=torch.int64))

    def beside(self, part: Part, kv: KVTensors) -> tuple[LawBackend, KVTensors]:
        return self.thinned, kv.first_layers(1)

    def _states(self, seen: torch.Tensor) -> torch.Tensor:
        assert seen.max() < FOREIGN, "a token is attended to that not all layers have computed"
        return super()._states(seen)


class ThinnedModel(ContextModel):
    """The thinned model of a `SelfDraftingModel`; it counts its passes."""

    num_passes = 0

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        self.num_passes += 1
        return super().logits(batch)

    def _entry(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super()._entry(token_ids, positions) + FOREIGN * len(self.laws)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that half characters are common."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
