"""Ranks in threads: each has the whole head, and all draft, keep and decide the same as one rank does."""

from dataclasses import replace

import pytest
import torch

from engine.drafting.registry import METHODS
from engine.execution.eager import EagerBackend
from engine.heads.tapped import with_head
from engine.models.causal_lm import Shard
from engine.params import SamplingParams
from engine.protocols import run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.heads.cold_starts import BLOCK, CASES, KINDS
from tests.engine.heads.tiny_heads import VOCAB, random_head
from tests.engine.models.test_shards import save_family
from tests.engine.ranks import gloo_reducers, on_ranks
from tests.engine.running import make_engine, run
from tests.engine.test_exactness import varied_requests
from tests.engine.tiny import model_of

HEADS = {"the target's last layer": {}, "its own last layer": {"draft_vocab": 63}, "few tokens": {"draft_vocab": 20}}
"""Every kind of head has few tokens here; the other last layers are shared code."""


def ranks_of(path, world_size, config):
    """Backends of all ranks, of which each loads its shard and the same head."""
    whole = random_head(model_of(path), config)
    reducers = gloo_reducers(world_size)
    shards = [Shard(one.rank, world_size, one) if world_size > 1 else None for one in reducers]
    models = on_ranks(lambda shard: model_of(path, shard), shards)
    heads = [random_head(model, config) for model in models]
    for head in heads:
        for parameter, expected in zip(head.parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    if config.draft_vocab_size < VOCAB:
        for head in heads[1:]:  # only the deciding rank's scores count
            head.lm_head.weight.add_(torch.randn_like(head.lm_head.weight))
    return on_ranks(EagerBackend, [with_head(model, head) for model, head in zip(models, heads, strict=True)])


class Ranks:
    """The verifiers of all ranks, which get the same rows; notes the drafts that the deciding rank verified."""

    def __init__(self, verifiers):
        self.verifiers = verifiers
        self.drafts = []

    async def verify(self, rows):
        def verify(rank):
            return run_in_process(self.verifiers[rank].verify(rows, decides=rank == 0))

        verdicts, *others = on_ranks(verify, range(len(self.verifiers)))
        assert others == [[]] * len(others)
        self.drafts += [(verdict.draft.token_ids, verdict.draft.parents) for verdict in verdicts]
        return verdicts

    def release(self, request_id):
        for verifier in self.verifiers:
            verifier.release(request_id)


def generate(backends, method, requests):
    """The texts and the verifiers of an engine over ranks."""
    engine = make_engine(backends[0], drafting=method, num_speculative_tokens=6, block_size=BLOCK)
    others = [ModelVerifier(backend, engine.config, None, METHODS[method].make_in_target) for backend in backends[1:]]
    engine.verifier = Ranks([engine.verifier, *others])
    return run(engine, requests), engine.verifier


@pytest.mark.parametrize(
    ("head", "kind", "method"),
    [("few tokens", *case.values) for case in CASES]
    + [(head, kind, "head") for head in HEADS if head != "few tokens" for kind in ("eagle3", "dspark")],
)
def test_ranks_draft_and_write_what_one_rank_does(head, kind, method, tmp_path):
    save_family("llama", tmp_path, num_key_value_heads=4)
    config = KINDS[kind](**HEADS[head])
    backends = [ranks_of(tmp_path, size, config) for size in (1, 2)]
    # The passes themselves draw the tokens of a batch only if none of its requests needs shaping.
    shaped = [(prompt, replace(params, max_tokens=6)) for prompt, params in varied_requests(3)[::2]]
    drawn = [([5 + i, 9, 4], SamplingParams(temperature=i % 2, seed=i, max_tokens=6)) for i in range(4)]
    for requests in (shaped, drawn):
        expected, alone = generate(backends[0], method, requests)
        texts, ranks = generate(backends[1], method, requests)
        assert texts == expected
        assert ranks.drafts == alone.drafts
        assert any(tokens for tokens, _ in ranks.drafts)
    first, *others = (verifier._kv for verifier in ranks.verifiers)
    head_layers = slice(2, None)
    for kv in others:
        assert torch.equal(kv.states[1:], first.states[1:])
        for layers, expected in ((kv.keys, first.keys), (kv.values, first.values)):
            for layer, other in zip(layers[head_layers], expected[head_layers], strict=True):
                assert torch.equal(layer[1:], other[1:])
