"""Bugs of other servers with hybrids and speculation, by their numbers, on a tiny Qwen3-Next."""

import functools
import shutil

import pytest
import torch

from engine import SamplingParams
from tests.engine.grammars import GRAMMARS, matches
from tests.engine.test_zoo import expected, make_llm, outputs, save_family
from tests.engine.tokenizers import json_tokenizer

COUNT = 12
RIGHT = functools.cache(expected)
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=1)
A, B = torch.randint(2, 64, (2, 150), generator=torch.Generator().manual_seed(7)).tolist()
SUFFIXES = torch.randint(2, 64, (16, 9), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hybrid")
    save_family("qwen3_next", path)
    return path


def check(llm, path, prompts):
    """The texts are transformers' own."""
    (ids, logprobs), (texts, right) = outputs(llm, prompts, PARAMS), RIGHT(path, tuple(map(tuple, prompts)), COUNT)
    assert ids == texts
    assert (logprobs - right).abs().max() < 1e-3


@pytest.mark.parametrize("drafting", ["none", "suffix"])
def test_requests_with_one_prefix_and_repeated_ones(drafting, path):
    """vllm#36872: gibberish from the third request on; MODELS: A-B-A-A, which vllm#43559 and #47194 answer wrongly.

    vllm#54360, sglang#32459: with speculation the prefix cache never, or rarely, hits. vllm#47930: with cached prefixes
    drafts are no longer accepted.
    """
    llm = make_llm(path, drafting=drafting)
    for suffix in SUFFIXES[:3]:
        check(llm, path, [A + suffix])
    cached = llm.stats.num_prefix_hits
    assert cached >= 2 * 128
    accepted = llm.stats.num_accepted_tokens
    for prompt in (A, B, A, A):
        check(llm, path, [prompt])
    assert llm.stats.num_prefix_hits >= cached + 3 * 128
    assert drafting == "none" or llm.stats.num_accepted_tokens >= accepted + COUNT


def test_sixteen_requests_at_once(path):
    """llama.cpp#27117: the acceptance rate falls from a half with 4 requests to 0.002 with 16."""
    llm = make_llm(path, drafting="suffix", num_blocks=256)
    prompts = [A[:20] + suffix for suffix in SUFFIXES]
    check(llm, path, prompts)
    drafted, accepted = llm.stats.num_draft_tokens, llm.stats.num_accepted_tokens
    check(llm, path, prompts)
    assert llm.stats.num_accepted_tokens - accepted > 0.8 * (llm.stats.num_draft_tokens - drafted) > COUNT


def test_texts_by_a_grammar(path, tmp_path):
    """sglang#36537: with speculation, what a grammar makes is broken."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    json_tokenizer().save_pretrained(tmp_path)
    names, prompts = ["json", "json", "regex"], [A, A[:70] + B[:3], B[:5]]
    params = [
        SamplingParams(temperature=i / 2, seed=i, max_tokens=90, grammar=GRAMMARS[name]) for i, name in enumerate(names)
    ]
    texts = []
    for settings in ({"drafting": "none"}, {"drafting": "suffix"}, {"drafting": "self", "self_draft_layers": 3}):
        llm = make_llm(tmp_path, **settings)
        for _ in range(2):
            results = [result.outputs[0] for result in llm.generate(prompts, params)]
            texts.append([result.token_ids for result in results])
            assert all(matches(name, result.text) for name, result in zip(names, results, strict=True))
        assert llm.stats.num_prefix_hits >= 128
        assert llm.stats.num_accepted_tokens > 60 or settings["drafting"] == "none"
    assert texts == texts[:1] * 6
