"""Runner: what knows vLLM's V1 model runner, which computes a round up to its logits and leaves sampling to us."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.output import SchedulerOutput

from engine.errors import ModelError


class Runner:
    """A worker's V1 model runner (vllm.v1.worker.gpu_model_runner), with its batch of requests.

    Its sampler, its rejection sampler and its drafter never run: `sample_tokens` is not called.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._hidden: Tensor | None = None
        self._tapped: Sequence[Tensor] = ()
        self._tokens: dict[str, range] = {}
        """Where each request's tokens are in the last round."""

    def append(self, added: Mapping[str, Sequence[int]]) -> None:
        """Append committed tokens to requests, as vLLM's `_bookkeeping_sync` does with sampled tokens."""
        batch = self._runner.input_batch
        for request_id, token_ids in added.items():
            if not token_ids:
                continue
            self._runner.requests[request_id].output_token_ids.extend(token_ids)
            index = batch.req_id_to_index.get(request_id)
            if index is not None:  # else vLLM adds it to the batch with all its tokens
                start = batch.num_tokens_no_spec[index]
                end = start + len(token_ids)
                batch.token_ids_cpu[index, start:end] = token_ids
                batch.is_token_ids[index, start:end] = True
                batch.num_tokens_no_spec[index] = end

    def run(self, output: SchedulerOutput) -> Tensor:
        """Compute a round; return float32 logits [n, vocab], in the order in which `output` names its requests.

        A request has a row for its last token, then a row for each draft token.
        """
        runner = self._runner
        runner.execute_model(output)
        state, runner.execute_model_state = runner.execute_model_state, None
        self._hidden, self._tapped = state.hidden_states, state.aux_hidden_states or ()
        drafts, first, rows = output.scheduled_spec_decode_tokens, 0, dict[str, range]()
        self._tokens.clear()
        token = 0
        for request_id in runner.input_batch.req_ids:
            rows[request_id] = range(first, first := first + 1 + len(drafts.get(request_id, ())))
            self._tokens[request_id] = range(token, token := token + output.num_scheduled_tokens[request_id])
        logits: Tensor = state.logits
        if [*rows] != [*output.num_scheduled_tokens]:
            order = [row for request_id in output.num_scheduled_tokens for row in rows[request_id]]
            logits = logits[torch.tensor(order, device=logits.device)]
        return logits.float()

    def logits_of(self, request_id: str, places: Iterable[int]) -> Tensor:
        """Return float32 logits [n, vocab] of other tokens of the last round: the request's n-th, for n in `places`."""
        assert self._hidden is not None, "a round comes first"
        tokens = self._tokens[request_id]
        index = torch.tensor([tokens[place] for place in places], device=self._hidden.device)
        logits: Tensor = self._runner.model.compute_logits(self._hidden[index])
        return logits.float()

    def tapped(self, request_ids: Iterable[str]) -> list[Tensor]:
        """Return what the last round's tokens of these requests left in each of `tap`'s layers, [tokens, width]."""
        index = torch.tensor([token for request_id in request_ids for token in self._tokens[request_id]])
        return [output[index.to(output.device)] for output in self._tapped]


def tap(model_runner: Any, layers: Sequence[int]) -> None:
    """Have a loaded model also return the outputs of its first so many layers, ascending, as for vLLM's own heads.

    Passes must not be compiled yet. Raises ModelError if the model cannot return them.
    """
    model = model_runner.get_model()
    if not supports_eagle3(model):
        problem = "does not return the outputs of its layers, which a head reads; set execution to torch"
        raise ModelError(f"vLLM's {type(model).__name__} {problem}")
    model_runner.use_aux_hidden_state_outputs = True
    model.set_aux_hidden_state_layers(tuple(layers))
