"""Speculative decoding as a library: tensors and tokens; no Ray, no HTTP.

The trunk, in reading order: `protocols` (a round's roles, messages and terms), `params` (the sampling parameters of a
request), `engine` (a step), `scheduler` (who takes part in a round), `rounds` (one in flight, or two that alternate),
`llm` (all of it in one process), `laws` (whether a rule or a drafter leaves the text's law alone), `config` (every
setting) and `errors` (every exception).

Each folder answers one question: `requests/` (which requests are served, which one starts next, and what has each of
them got?), `blocks/` (which blocks are whose, which can be shared, and what else does a kind of cache give to
requests?), `control/` (how many draft tokens, for whom, and do they pay?), `stats/`
(what is counted?), `sampling/` (which token do these logits give?), `drafting/`
(who proposes?), `verification/` (which draft tokens are accepted?), `models/` (which model is this, and where are its
weights?), `hybrids/` (how does the state of linear layers roll back?), `encoder_decoder/` (how does an encoder's output
get into the cache of a decoder?), `heads/` (how does a trained head draft from a target's layers?), `execution/` (how
is a pass computed?) and `training/` (how is a draft made, and is it worth it?).
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from engine.params import SamplingParams

if TYPE_CHECKING:
    from engine.laws import check_drafter, check_rule
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "check_drafter", "check_rule"]

# transformers imports torchao wherever it is installed, and torchao then warns of its CUDA libraries, used or not.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, because most processes of the service do not."""
    if name in __all__:
        return getattr(importlib.import_module("engine.llm" if name == "LLM" else "engine.laws"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
