"""TappedLM: a target whose every pass also writes what its head keeps about the tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.heads.head import Head
from engine.models.causal_lm import CausalLM
from engine.models.first_layers import decoder_layers


class TappedLM(nn.Module):
    """Calls the target, then gives the outputs of its tapped layers to the head."""

    def __init__(self, lm: nn.Module, head: Head) -> None:
        """Tap the target's layers; raise ModelError if its decoder layers are not in one list."""
        super().__init__()
        self.lm, self.head = lm, head
        _, layers = decoder_layers(lm)
        for count in set(head.config.taps):
            layers[count - 1].register_forward_hook(partial(_tap, count), with_kwargs=True)

    def forward(self, **inputs: Any) -> Any:
        output, context = self.lm(**inputs), inputs["paged"]
        context.write_states(self.head.feature([context.taps[count][0] for count in self.head.config.taps]))
        context.taps.clear()
        if self.head.keeps_kv:
            self.head.absorb(inputs["input_ids"], inputs["position_ids"], context)
        return output

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.lm.get_output_embeddings()  # type: ignore[operator]
        return head


def _tap(count: int, _layer: nn.Module, _: object, inputs: dict[str, Any], output: Tensor | tuple[Tensor, ...]) -> None:
    inputs["paged"].taps[count] = output if isinstance(output, Tensor) else output[0]


def with_head(model: CausalLM, head: Head) -> CausalLM:
    """Return a loaded model whose passes keep what a head needs."""
    return replace(model, module=TappedLM(model.module, head), head=head)
