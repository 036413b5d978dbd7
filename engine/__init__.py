"""Speculative decoding as a library: tensors and tokens; no Ray, no HTTP.

In reading order: `protocols` (a round's roles, messages and terms), `engine` (a step), `scheduler` (who takes part in a
round), `sequence` (a request's committed tokens), `block_pool` (KV blocks), `draft_length` (how many tokens to draft),
`acceptance` (how many of them are accepted), `verification/` (which draft tokens are accepted), `drafting/` (who
proposes them), `sampling/` (logits to a token), `models/` (loading transformers models), `execution/` (forward passes
on a device), `detokenizer` (token ids to text), `llm` (all of it in one process). Beside them `config` (every setting),
`errors` (every exception), `stats` (counters), `request_stats` (times and lengths of requests), `scratch` (temporary
folders) and `training/` (pretraining and distilling models).
"""

import logging
from typing import TYPE_CHECKING, Any

from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]

# transformers imports torchao wherever it is installed, and torchao then warns of its CUDA libraries, used or not.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use, because most processes of the service do not need torch."""
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
