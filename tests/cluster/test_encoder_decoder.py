"""T5 over links, with itself as its draft: what the Router sends is all that workers need."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.workers.draft_queue import DraftQueue
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.engine import Engine
from engine.errors import TargetError
from engine.params import SamplingParams
from engine.verification.verifier import ModelVerifier
from tests.cluster.fakes import FakeLink, queue_worker
from tests.engine.tiny import T5_SIZES, backend_of, save

CONFIG = EngineConfig(num_blocks=200, block_size=4, num_speculative_tokens=4, speculation="fixed")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(T5Config(**T5_SIZES), tmp_path_factory.mktemp("target"), seed=1, factor=3.0)


@pytest.mark.parametrize("loses_target", [False, True])
async def test_a_served_pair_writes_transformers_text(loses_target, path):
    """The target is also lost in mid-text, and its successor starts with no keys and values and no prefixes."""
    target = backend_of(path)
    drafter, verifier = RemoteDrafter(vocab_size=64, timeout_s=60), RemoteVerifier(vocab_size=64, timeout_s=60)
    queue = DraftQueue([DraftModel(target)], replace(CONFIG, drafting="model"), capacity=8)
    drafter.connect(FakeLink(queue_worker(queue)), [].append)

    def start_target():
        responder = TargetResponder(ModelVerifier(target, CONFIG), rank=0, capacity=8, version=1)
        verifier.connect([FakeLink(responder.answer)])

    start_target()
    engine = Engine(CONFIG, target.info, drafter=drafter, verifier=verifier, num_blocks=201)
    prompts = {"a": [5, 9, 30, 1], "b": list(range(2, 33)), "c": [40, 1]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    texts = {name: [] for name in prompts}
    rounds = 0
    while engine.has_work:
        rounds += 1
        if loses_target and rounds == 4:
            verifier.disconnect("it was killed")
        try:
            outputs = await engine.step()
        except TargetError:
            start_target()
            engine.reset()
            continue
        for output in outputs:
            texts[output.request_id] += output.token_ids
    module = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
    for name, prompt in prompts.items():
        settings = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False, "use_cache": False}
        assert texts[name] == module.generate(torch.tensor([prompt]), **settings)[0, 1:].tolist()
    assert engine.stats.num_accepted_tokens > 0.9 * engine.stats.num_draft_tokens > 0
