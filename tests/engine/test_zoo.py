"""Every family that docs/families.md lists as served writes transformers' own text, with drafts and without."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.models.causal_lm import CausalLM
from engine.models.loader import load_whole, skeleton_of
from tests.engine.tiny import check_same, source_of
from tests.fakes import sharpen
from tests.families import listed, tiny_config

NAMES = listed()[1]
FAST = (
    "deepseek_v3",
    "falcon_h1",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "nemotron_h",
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)
PROMPTS = torch.randint(2, 64, (2, 19), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS[1] = PROMPTS[1][:5]


def save_family(name, path, seed=0):
    """Write a tiny random model of a family, with a tokenizer of words, or skip the test."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:  # else many are zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
    sharpen(module)
    module.save_pretrained(path)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)


def make_llm(path, draft="none", **settings):
    limits = {"num_blocks": 64, "speculation": "fixed", "num_speculative_tokens": 4}
    return LLM(path, draft, dtype="float32", device="cpu", compile="off", num_threads=1, **limits | settings)


def outputs(llm, prompts=PROMPTS, params=PARAMS):
    """The token ids and log probabilities of each prompt's text."""
    results = [result.outputs[0] for result in llm.generate(prompts, params)]
    return [one.token_ids for one in results], torch.tensor([[at.logprob for at in one.logprobs] for one in results])


def expected(path, prompts=PROMPTS, count=PARAMS.max_tokens):
    """What transformers generates."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    texts, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, return_dict_in_generate=True, **settings
        )
        texts.append(output.sequences[0, len(prompt) :])
        logprobs.append(torch.cat(output.logits).log_softmax(-1).gather(1, texts[-1].unsqueeze(1))[:, 0])
    return [text.tolist() for text in texts], torch.stack(logprobs)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES])
def test_a_served_family_writes_transformers_own_text(name, tmp_path):
    """Without drafts, and with copies: of the text that was written before, after a prompt that is cached."""
    save_family(name, tmp_path)
    texts, logprobs = expected(tmp_path)
    copying = make_llm(tmp_path, drafting="suffix")
    outputs(copying)
    for llm in (make_llm(tmp_path, drafting="none"), copying):
        ids, written = outputs(llm)
        assert ids == texts
        assert (written - logprobs).abs().max() < 1e-3
    assert copying.stats.num_accepted_tokens >= PARAMS.max_tokens
    check_weights(tmp_path)


def check_weights(path):
    """Check that in half precision, too, a family has the weights that transformers loads."""
    source = source_of(path)
    module = CausalLM.load_module(source.directory, source.configuration, torch.bfloat16)
    skeleton = skeleton_of(source, torch.bfloat16)
    check_same(load_whole(source, skeleton, torch.bfloat16, torch.device("cpu")), module)
