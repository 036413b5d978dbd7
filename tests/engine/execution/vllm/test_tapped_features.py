"""Features of tokens that vLLM computes: those of our own passes, wherever the tokens are computed."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="`make vllm` has it")

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.errors import ModelError
from engine.execution.registry import make_backend
from engine.execution.vllm.runner import tap
from engine.execution.vllm.vllm_verifier import VllmVerifier
from engine.heads.registry import load_target
from engine.params import SamplingParams
from engine.protocols import Request, VerifyRow, chain, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.heads.saved_heads import CONFIGS, save_head
from tests.engine.tiny import source_of
from tests.models import save_llama

ENGINE = EngineConfig(num_blocks=12, block_size=32, num_speculative_tokens=4, drafting="head_worker", max_num_seqs=4)


@pytest.mark.parametrize(("kind", "compile"), [*((kind, "off") for kind in CONFIGS), ("dflash", "auto")])
def test_features_are_those_of_our_own_passes(kind, compile, tmp_path):
    """Prompts in chunks, drafts of other lengths, and rows in another order than vLLM's batch."""
    path = save_llama(tmp_path / "target", seed=1, head_dim=32)
    source = source_of(path, head=save_head(tmp_path / "head", path, kind))
    ours = ModelVerifier(make_backend(load_target(source), source), ENGINE, None, METHODS["head"].make_in_target)
    if compile == "auto":
        VllmVerifier(source_of(path, execution="vllm", compile=compile), ENGINE, None, None)  # its passes are others
    tapped = source_of(path, head=source.config.head, execution="vllm", compile=compile)
    theirs = VllmVerifier(tapped, ENGINE, None, None)
    requests = [Request(name, [7 + i, 3, 9] * 20, 60, SamplingParams(temperature=0)) for i, name in enumerate("abc")]
    blocks = {"a": [5, 2, 9], "b": [1, 3], "c": [8, 4, 6]}
    rows = [VerifyRow(request, 0, 40, blocks[request.request_id], chain([])) for request in requests]
    more = [replace(row, start=40, length=19, draft=chain([])) for row in rows]
    last = [replace(row, start=59, length=1, draft=chain([4] * i)) for i, row in enumerate(rows)]
    for batch in (rows, more, [last[2], last[0], last[1]]):
        for verifier in (ours, theirs):
            run_in_process(verifier.verify(batch))
    for i, row in enumerate(last):
        slots = [theirs.kv.slot(row.block_ids, place) for place in range(60 + i)]
        features = theirs.kv.states.flatten(0, 1)[slots]
        assert features.abs().amin(-1).gt(0).all()
        torch.testing.assert_close(features, ours.kv.states.flatten(0, 1)[slots], rtol=1e-4, atol=1e-4)


def test_a_model_that_returns_no_outputs_of_layers_is_refused():
    class Runner:
        def get_model(self):
            return torch.nn.Identity()

    with pytest.raises(ModelError, match=r"vLLM's Identity does not return the outputs of its layers, .* to torch"):
        tap(Runner(), [1])
