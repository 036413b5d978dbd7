"""Log probabilities of prompt tokens: those of transformers' own forward, however the prompt was computed."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.running import chains, make_engine, run_outputs

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=20, prompt_logprobs=3, ignore_eos=True)


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in (1, 2, 15, 16, 17, 60, 90)]


@pytest.fixture(scope="module")
def reference(target_path):
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)

    def logprobs(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def check(found, prompt, reference):
    expected = reference(prompt)
    assert len(found) == len(prompt) - 1
    for i, (token, entry) in enumerate(zip(prompt[1:], found, strict=True)):
        assert entry.logprob == pytest.approx(float(expected[i, token]), abs=1e-4)
        assert entry.rank == int((expected[i] > expected[i, token]).sum()) + 1
        top, ids = expected[i].topk(3)
        assert entry.top_logprobs == pytest.approx(top.tolist(), abs=1e-4)
        assert entry.top_ids == ids.tolist()


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 7}, {"num_blocks": 12, "max_num_seqs": 8}],
    ids=["chunked", "preempted"],
)
def test_logprobs_equal_those_of_transformers(settings, target, reference, make_verifier):
    engine = make_engine(target, chains(target), make_verifier=make_verifier, num_speculative_tokens=3, **settings)
    requests = [(prompt, PARAMS) for prompt in prompts()]
    outputs = run_outputs(engine, requests)
    for i, prompt in enumerate(prompts()):
        first, *rest = outputs[str(i)]
        check(first.prompt_logprobs, prompt, reference)
        assert all(output.prompt_logprobs is None for output in rest)
    if "num_blocks" in settings:
        assert engine.stats.num_preemptions > 0


def test_prompt_logprobs_of_a_cached_prefix_are_computed(target, reference, make_verifier):
    prompt = prompts()[-1]
    engine = make_engine(target, make_verifier=make_verifier, num_speculative_tokens=0)
    plain = replace(PARAMS, prompt_logprobs=None)
    texts = []
    for params, is_cached in ((plain, False), (PARAMS, False), (plain, True)):
        (outputs,) = run_outputs(engine, [(prompt, params)]).values()
        assert (outputs[0].num_cached_tokens > 0) == is_cached
        if params is PARAMS:
            check(outputs[0].prompt_logprobs, prompt, reference)
        texts.append([token for output in outputs for token in output.token_ids])
    assert texts[0] == texts[1] == texts[2]
