"""T5 through the engine: transformers' text with drafts and without, in little memory, and at temperatures."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.errors import RequestError
from engine.laws import p_value
from engine.protocols import ProposeRow, Request, run_in_process
from tests.engine.laws import shaped_law
from tests.engine.running import SAMPLING, chains, drafters, make_engine, run
from tests.engine.tiny import T5_SIZES, backend_of, save
from tests.engine.tokenizers import word_tokenizer

LENGTHS = (1, 3, 8, 15, 16, 17, 30, 5)
MAX_TOKENS = 28


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save(T5Config(**T5_SIZES), tmp_path_factory.mktemp("target"), seed=1, factor=3.0)


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory):
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    return save(T5Config(**T5_SIZES | sizes), tmp_path_factory.mktemp("draft"), seed=2, factor=3.0)


@pytest.fixture(scope="module")
def target(target_path):
    return backend_of(target_path)


@pytest.fixture(scope="module")
def draft(draft_path):
    return backend_of(draft_path)


@pytest.fixture(scope="module")
def module(target_path):
    return AutoModelForSeq2SeqLM.from_pretrained(target_path, dtype=torch.float32).eval()


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 64, (length,), generator=generator).tolist() for length in LENGTHS]


def transformers_text(module, prompt, **settings):
    """What `generate` returns, without the token that starts it; its cache has as many layers as the encoder only."""
    settings = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "use_cache": False} | settings
    with torch.no_grad():
        return module.generate(torch.tensor([prompt]), **settings)[0, 1:].tolist()


def requests(**params):
    params = {"temperature": 0.0, "max_tokens": MAX_TOKENS} | params
    return [(prompt, SamplingParams(**params)) for prompt in prompts()]


def engine_of(name, target, draft, **settings):
    k = 0 if name == "none" else 4
    drafter = drafters(target, draft).get(name)
    return make_engine(target, drafter, num_speculative_tokens=k, block_size=4, **settings)


@pytest.fixture(scope="module")
def texts(module):
    return {str(i): transformers_text(module, prompt) for i, prompt in enumerate(prompts())}


@pytest.mark.parametrize("name", ["none", "the target itself", "forgetful"])
def test_greedy_text_is_that_of_transformers(name, target, draft, texts):
    engine = engine_of(name, target, draft)
    assert run(engine, requests()) == texts
    assert len({tuple(text) for text in texts.values()}) == len(texts), "the texts depend on the prompts"
    if name == "the target itself":
        assert engine.stats.num_accepted_tokens > 0.9 * engine.stats.num_draft_tokens > 0


def test_penalties_count_the_text_and_not_the_prompt(target, draft, module):
    expected = {str(i): transformers_text(module, prompt, repetition_penalty=1.7) for i, prompt in enumerate(prompts())}
    engine = engine_of("a random draft", target, draft)
    assert run(engine, requests(repetition_penalty=1.7)) == expected


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_two_tokens_have_the_targets_joint_law(verification, tmp_path, module):
    """A vocabulary of six; 1,000 samples of two tests at 1e-5 each."""
    sizes = T5_SIZES | {"vocab_size": 6}
    paths = [
        save(T5Config(**sizes), tmp_path / name, seed=seed, factor=2.0) for seed, name in ((3, "target"), (4, "draft"))
    ]
    target, draft = map(backend_of, paths)
    module = AutoModelForSeq2SeqLM.from_pretrained(paths[0], dtype=torch.float32).eval()
    prompt, params = [4, 2, 5, 1], SamplingParams(temperature=2.5, max_tokens=4, ignore_eos=True)
    engine = make_engine(target, chains(draft), **SAMPLING, verification=verification)
    sampled = run(engine, [(prompt, replace(params, seed=seed)) for seed in range(1000)])
    assert 0.2 < engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens < 0.9

    def next_law(text):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[0, *text]])).logits
        return shaped_law(logits[0, -1].tolist(), params, list(text), 0)

    # Of the second and third token: the first is not drafted.
    law = Counter()
    for first, first_prob in enumerate(next_law(())):
        for second, second_prob in enumerate(next_law((first,))):
            for third, third_prob in enumerate(next_law((first, second))):
                law[second, third] += first_prob * second_prob * third_prob
    counts = Counter(tuple(text[1:3]) for text in sampled.values())
    assert p_value(counts, law) > 1e-5


def test_inputs_that_do_not_fit_into_one_pass_of_the_draft_are_encoded_in_several(target):
    config = EngineConfig(num_blocks=100, block_size=4, max_num_batched_tokens=20)
    params = SamplingParams(temperature=0.0)
    requests = [
        Request(str(len(prompt)), [*prompt, 0, 5, 9], len(prompt) + 1, params, input_length=len(prompt))
        for prompt in prompts()[2:6]
    ]
    rows = [ProposeRow(request, 4) for request in requests]
    together = run_in_process(ModelDrafter(DraftModel(target), config).propose(rows))
    alone = [run_in_process(ModelDrafter(DraftModel(target), config).propose([row])) for row in rows]
    assert [[draft] for draft in together] == alone


def test_limits_of_texts_are_those_of_the_cache_and_the_context(target, draft, module):
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    engine = engine_of("none", target, draft, num_blocks=9)
    with pytest.raises(RequestError, match="predicts none of it, so there are no prompt_logprobs"):
        engine.add("a", [5] * 3, replace(params, prompt_logprobs=0))
    assert len(run(engine, [([5] * 20, params)])["0"]) == 9 * 4 - 20 - 1
    text = run(engine_of("none", target, draft, max_model_len=12), [([5] * 10, params)])["0"]
    assert text == transformers_text(module, [5] * 10, max_new_tokens=2, min_new_tokens=2)


# --- LLM ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(target_path, draft_path):
    for path in (target_path, draft_path):
        word_tokenizer().save_pretrained(path)
    return target_path, draft_path


def make_llm(*models, **settings):
    return LLM(*models, **({"dtype": "float32", "device": "cpu", "num_threads": 1} | settings))


@pytest.mark.parametrize("k", [0, 4])
def test_a_pair_writes_what_generate_writes(k, pair, module):
    tokenizer, texts = word_tokenizer(), ["a1 b2c3 d4", "f5 f5 f5", "b1"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert all(prompt[-1] == 1 for prompt in ids), "a text ends with the token that ends texts"
    expected = [tokenizer.decode(transformers_text(module, prompt), skip_special_tokens=True) for prompt in ids]
    llm = make_llm(*pair, num_speculative_tokens=k, speculation="fixed")
    results = llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    assert [result.outputs[0].text for result in results] == expected
    assert [result.prompt_token_ids for result in results] == ids
    assert (llm.stats.num_draft_tokens > 0) == (k > 0)
    marked = SamplingParams(temperature=0.0, max_tokens=2, logit_bias={2: 100.0})
    assert llm.generate(texts[0], marked)[0].outputs[0].text == "a1 a1", "a text begins without the mark of a word"
