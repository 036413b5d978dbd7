"""What a head drafted in an engine, and what its cache held, compared with a cold start at the same text."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.drafting.model.next_tokens import Confidence
from engine.drafting.registry import METHODS
from engine.heads.registry import HEADS
from engine.protocols import Draft, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.heads.test_dflash import block_config
from tests.engine.heads.tiny_heads import backend_with_head, head_config

KINDS = {
    "eagle3": head_config,
    "eagle3, two layers": partial(head_config, layers=2, kv_heads=2),
    "mtp": partial(head_config, "mtp", taps=(2,)),
    "peagle": partial(head_config, "peagle", layers=2, mask_token_id=60),
    "dflash": partial(block_config, ["sliding_attention", "full_attention"]),
    "dspark": partial(block_config, kind="dspark", sample_from_anchor=True, markov_rank=4),
}
"""Functions that return the configuration of a tiny head."""
SPOILED = {"not a number": float("nan"), "infinite": float("inf"), "few tokens": None}
"""Heads of which every logit is such a number, and so are their features; or that draft 9 of the 64 tokens."""
CASES = [
    pytest.param(kind, method, id=f"{kind} {method}", marks=() if kind.startswith("eagle3") else pytest.mark.slow)
    for kind, make_config in KINDS.items()
    for method in ("head", "head_tree")
    if method == "head" or not HEADS[make_config().kind].drafts_blocks
]
"""Every kind with each method that drafts with it."""
BLOCK = 4


class Recorder:
    """Notes every draft that an engine's target makes, with what its cache holds about the tokens before."""

    def __init__(self, engine, monkeypatch):
        # What is learned from the requests before changes the shape of trees.
        monkeypatch.setattr(Confidence, "learn", lambda *_: None)
        self.engine, self.verifier = engine, engine.verifier
        self.backend = self.verifier.backend
        self.drafts = []
        self.draft = self.verifier._drafter.draft
        monkeypatch.setattr(self.verifier._drafter, "draft", self._note)

    def _note(self, rows, *, decides):
        held = [entries(self.verifier, row) if row.draft.num_deferred else None for row in rows]
        drafted = self.draft(rows, decides=decides)
        for row, cached, made in zip(rows, held, drafted, strict=True):
            if cached is not None:
                row = replace(row, request=row.request.copy(), block_ids=list(row.block_ids))
                self.drafts.append((row, cached, made.draft))
        return drafted

    def check(self, least):
        """Compare all drafts and all that was cached with those of a cache that computed each text at once."""
        assert len(self.drafts) >= least
        config = self.engine.config
        size = max(len(row.block_ids) for row, _, _ in self.drafts)
        cold = ModelVerifier(
            self.backend,
            replace(config, num_blocks=1 + size * len(self.drafts)),
            None,
            METHODS[config.drafting].make_in_target,
        )
        rows = []
        for i, (row, _, _) in enumerate(self.drafts):
            blocks = list(range(1 + i * size, 1 + i * size + len(row.block_ids)))
            request = replace(row.request, request_id=str(i))
            rows.append(replace(row, request=request, block_ids=blocks))
        prompts = [replace(row, start=0, length=row.start, draft=Draft()) for row in rows if row.start]
        run_in_process(cold.verify(prompts))
        with torch.inference_mode():
            expected = [entries(cold, row) for row in rows]
            drafted = cold._drafter.draft(rows, decides=True)
        for (_, cached, draft), once, again in zip(self.drafts, expected, drafted, strict=True):
            torch.testing.assert_close(cached, once, rtol=1e-4, atol=1e-4)
            assert (draft.token_ids, draft.parents) == (again.draft.token_ids, again.draft.parents)


def entries(verifier, row):
    """The states, and the head's keys and values, of a row's computed tokens; not those that are never read."""
    kv, first = verifier._kv, verifier.backend.model.head.first_layer
    slots = [kv.slot(row.block_ids, place) for place in range(row.start)]
    read = slots[verifier.backend.model.head.attends_from :]
    caches = [cache.flatten(0, 1)[read].flatten() for cache in (*kv.keys[first:], *kv.values[first:])]
    return torch.cat([kv.states.flatten(0, 1)[slots].flatten(), *caches])


def backend_of_kind(path, kind, spoiled=""):
    """The backend of a saved target with a head of a kind, which may be spoiled."""
    value = SPOILED.get(spoiled)
    backend = backend_with_head(path, KINDS[kind](**({"draft_vocab": 9} if spoiled and value is None else {})))
    if value is not None:
        with torch.no_grad():
            for name, parameter in backend.model.head.named_parameters():
                if name.startswith(("fc.", "eh_proj.")):
                    parameter.fill_(value)
    return backend
