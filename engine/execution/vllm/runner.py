"""Runner: what knows vLLM's V1 model runner, which computes a round up to its logits and leaves sampling to us."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput


class Runner:
    """A worker's V1 model runner (vllm.v1.worker.gpu_model_runner), with its batch of requests.

    Its sampler, its rejection sampler and its drafter never run: `sample_tokens` is not called.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._hidden: Tensor | None = None
        self._firsts: dict[str, int] = {}

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
        self._hidden = state.hidden_states
        drafts, first, rows = output.scheduled_spec_decode_tokens, 0, dict[str, range]()
        self._firsts.clear()
        next_token = 0
        for request_id in runner.input_batch.req_ids:
            rows[request_id] = range(first, first := first + 1 + len(drafts.get(request_id, ())))
            self._firsts[request_id] = next_token
            next_token += output.num_scheduled_tokens[request_id]
        logits: Tensor = state.logits
        if [*rows] != [*output.num_scheduled_tokens]:
            order = [row for request_id in output.num_scheduled_tokens for row in rows[request_id]]
            logits = logits[torch.tensor(order, device=logits.device)]
        return logits.float()

    def logits_of(self, request_id: str, places: Iterable[int]) -> Tensor:
        """Return float32 logits [n, vocab] of other tokens of the last round: the request's n-th, for n in `places`."""
        assert self._hidden is not None, "a round comes first"
        first = self._firsts[request_id]
        index = torch.tensor([first + place for place in places], device=self._hidden.device)
        logits: Tensor = self._runner.model.compute_logits(self._hidden[index])
        return logits.float()
