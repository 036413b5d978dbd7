"""Speculative decoding as a library: tensors and tokens; no Ray, no HTTP.

The trunk, in reading order: `protocols` (roles, messages and terms of a round), `params` (sampling parameters),
`engine` (a step), `scheduler` (the requests of a round), `rounds` (one round in flight, or two that alternate), `llm`
(the engine in one process), `audit` (a finished text, checked), `laws` (tests of a rule or drafter), `config`
(settings) and `errors` (exceptions).

The folders: `requests/` (admission, order and progress of requests), `blocks/` (the KV cache's blocks), `control/`
(draft lengths), `stats/` (counters), `sampling/` (logits to tokens), `drafting/` (drafters), `verification/`
(acceptance), `models/` (families and weights), `hybrids/` (models with linear layers), `encoder_decoder/` (models with
an encoder), `heads/` (trained heads), `execution/` (forward passes) and `training/` (how drafts are made and
evaluated).
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
