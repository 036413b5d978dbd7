"""Schedule: the rows of our rounds as vLLM's `SchedulerOutput`.

vLLM's runner keeps each request's tokens and blocks, so that a round names only what is new. A request that the runner
does not know, or whose blocks are others than it knows (after a preemption), is announced with all its tokens. A
request's drafts are overwritten by its next round, which says where it starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from engine.blocks.block_pool import BlockTable, block_table
from engine.protocols import Request, VerifyRow

_UNUSED = SamplingParams(temperature=0.0)
"""vLLM's sampler never runs."""


@dataclass(slots=True)
class _Known:
    """What the runner knows of a request: its blocks, its tokens, and how many it had when it was announced."""

    block_ids: BlockTable
    num_announced: int
    num_tokens: int


@dataclass(slots=True)
class PlannedRound:
    """A round for the runner; `added` holds the tokens that were committed since the runner last saw a request."""

    output: SchedulerOutput
    added: dict[str, list[int]]


class Schedule:
    """Remembers what a rank's runner knows of each request."""

    def __init__(self, adapters: Mapping[str, LoRARequest] = MappingProxyType({})) -> None:
        self._adapters = adapters
        self._known: dict[str, _Known] = {}
        self._ended: set[str] = set()

    def release(self, request_id: str) -> None:
        """Have the next round end a request; unknown ids are ignored."""
        if self._known.pop(request_id, None) is not None:
            self._ended.add(request_id)

    def plan(self, rows: Sequence[VerifyRow]) -> PlannedRound:
        """Return the next round, whose rows are of different requests."""
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        added: dict[str, list[int]] = {}
        for row in rows:
            request, block_ids = row.request, block_table(row.block_ids)
            known = self._known.get(request.request_id)
            if known is not None and not _extends(request, block_ids, known):
                self.release(request.request_id)
                known = None
            if known is None:
                self._known[request.request_id] = _Known(block_ids[:], len(request.token_ids), len(request.token_ids))
                new.append(self._announced(request, block_ids, row.start))
                continue
            added[request.request_id] = request.token_ids[known.num_tokens :]
            new_ids = block_ids[len(known.block_ids) :].tolist()
            cached.req_ids.append(request.request_id)
            cached.new_token_ids.append([])
            cached.new_block_ids.append((new_ids,) if new_ids else None)
            cached.num_computed_tokens.append(row.start)
            cached.num_output_tokens.append(len(request.token_ids) - known.num_announced)
            known.block_ids.extend(new_ids)
            known.num_tokens = len(request.token_ids)
        drafts = {row.request.request_id: row.draft.token_ids for row in rows if row.draft.token_ids}
        lengths = {row.request.request_id: row.length + len(row.draft.token_ids) for row in rows}
        ended, self._ended = self._ended, set()
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=lengths,
            total_num_scheduled_tokens=sum(lengths.values()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_encoder_inputs={},
            finished_req_ids=ended,
            free_encoder_mm_hashes=[],
        )
        return PlannedRound(output, added)

    def _announced(self, request: Request, block_ids: BlockTable, start: int) -> NewRequestData:
        adapter = request.params.adapter
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=list(request.token_ids),
            mm_features=[],
            sampling_params=_UNUSED,
            pooling_params=None,
            block_ids=(block_ids.tolist(),),
            num_computed_tokens=start,
            lora_request=None if adapter is None else self._adapters[adapter],
        )


def _extends(request: Request, block_ids: BlockTable, known: _Known) -> bool:
    """Return whether a request has all the blocks and tokens that the runner knows, and perhaps more."""
    return len(request.token_ids) >= known.num_tokens and block_ids[: len(known.block_ids)] == known.block_ids
