"""Generation: what an Ingress asks of a Router, in one streaming call."""

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from engine.sampling.params import MAX_SEED, SamplingParams
from engine.sequence import RequestOutput


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to generate: `n` of them per prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request's worth of prompts.

    The id is ours, never the client's: it names KV blocks and the drafter's prefixes.

    Attributes:
        interval_s: how long tokens are gathered after a delivery; `math.inf` delivers each sequence whole.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    timeout_s: float
    cache_salt: str | None = None
    interval_s: float = 0.0

    @property
    def num_choices(self) -> int:
        """How many sequences this asks for."""
        return len(self.prompts) * self.params.n

    def sequences(self) -> list[SequenceRequest]:
        """Return the sequences; choice `i` of the response is the `i`-th.

        Choice j of a prompt draws with the seed plus j, so that each prompt of a batch gets the text it would
        get alone.
        """
        sequences = []
        for index in range(self.num_choices):
            prompt, choice = divmod(index, self.params.n)
            params = replace(self.params, n=1, seed=_seed(self.params.seed, choice))
            sequences.append(SequenceRequest(f"{self.request_id}-{index}", self.prompts[prompt], params))
        return sequences


def choice_index(request_id: str) -> int:
    """Return which choice of its response a sequence is."""
    return int(request_id.rpartition("-")[2])


async def without_tokens(
    rounds: AsyncGenerator[list[RequestOutput], None],
) -> AsyncGenerator[list[RequestOutput], None]:
    """Yield rounds of requests for one token as if they had been for none: what is left is the prompt's score."""
    try:
        async for outputs in rounds:
            yield [
                replace(
                    output,
                    token_ids=[],
                    text="",
                    logprobs=None if output.logprobs is None else [],
                    finish_reason="length",
                    stop_reason=None,
                )
                for output in outputs
            ]
    finally:
        await rounds.aclose()


def _seed(seed: int | None, choice: int) -> int:
    if seed is None:
        return secrets.randbits(63)
    span = 2 * (MAX_SEED + 1)
    return (seed + choice + MAX_SEED + 1) % span - MAX_SEED - 1
