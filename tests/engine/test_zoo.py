"""Architectures of transformers: each writes transformers' own text, with drafts and without, or is refused in words.

Random small models, float32, greedy. test_eager.py compares logits of some of them to six digits.
"""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from engine.errors import ModelError
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import CausalLM
from engine.models.loader import _load_whole
from engine.params import SamplingParams
from tests.engine.hybrids import HYBRIDS
from tests.engine.running import chains, make_engine, run
from tests.engine.tiny import (
    EXPERTS,
    GEMMA4,
    HEADS,
    LATENT,
    LLAMA4,
    SHARED,
    SIZES,
    T5_SIZES,
    check_same,
    model_of,
    save,
    source_of,
)

pytestmark = pytest.mark.slow

DENSE = """
    Apertus Arcee BitNet Cohere Cohere2 Ernie4_5 Exaone4 Gemma Gemma2 Gemma3Text Glm Glm4 Granite HunYuanDenseV1 Jais2
    Llama Mellum Ministral Ministral3 Mistral NanoChat Olmo Olmo2 Olmo3 Phi Phi3 Qwen2 Qwen3 SeedOss SmolLM3 Starcoder2
    VaultGemma"""
MIXTURES = """
    Afmoe Dots1 FlexOlmo Glm4Moe GptOss GraniteMoe GraniteMoeShared HYV3 HunYuanMoEV1 MiniMaxM2 Mixtral Olmoe Phimoe
    Qwen2Moe Qwen3Moe SolarOpen"""
LATENT_ATTENTION = "AXK1 DeepseekV2 DeepseekV3 Glm4MoeLite MiniCPM3 Mistral4 Youtu"
SERVED = {
    **dict.fromkeys(DENSE.split(), HEADS),
    **dict.fromkeys(MIXTURES.split(), HEADS | EXPERTS),
    **dict.fromkeys(LATENT_ATTENTION.split(), EXPERTS | LATENT),
    "Gemma3nText": SHARED | {"intermediate_size": [64] * 6},
    "Gemma4Text": GEMMA4,
    "Llama4Text": LLAMA4,
}
SERVED |= HYBRIDS
ENCODER_DECODERS = ("MT5", "T5", "UMT5")
REFUSED = {
    "Bart": ({}, "encoder-decoder"),
    "Bloom": ({"n_head": 4}, "attention cannot be replaced"),
    "Falcon": ({}, "attention cannot be replaced"),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, "cannot be run with paged attention"),
    "GPTNeoX": ({}, "cannot be run with paged attention"),
    "Jamba": ({}, "linear_attention layers, whose state cannot roll back"),
    "MiniMax": (HEADS, "linear_attention layers, whose state cannot roll back"),
    "Nemotron": ({}, "do not pass keyword arguments on"),
    "OPT": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, "cannot be run with paged attention"),
    "RecurrentGemma": ({}, "linear_attention layers, whose state cannot roll back"),
    "StableLm": ({}, "do not pass keyword arguments on"),
}


def config_of(name, extra):
    cls = getattr(transformers, f"{name}Config", None)
    if cls is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    fields = cls.__dataclass_fields__
    return cls(**SIZES | {key: value for key, value in extra.items() if key in fields})


def load(path):
    return EagerBackend(model_of(path))


PROMPTS = torch.randint(2, 64, (2, 19), generator=torch.Generator().manual_seed(5)).tolist()


def save_pair(config, path, factor):
    for seed, folder in ((0, "target"), (1, "draft")):
        save(config, path / folder, seed=seed, factor=factor)


def check_texts(path, requests, texts):
    """Without drafts, with another model's and with its own, the target writes these texts; return it."""
    target, draft = load(path / "target"), load(path / "draft")
    assert run(make_engine(target, num_speculative_tokens=0), requests) == texts
    for backend in (draft, target):
        assert run(make_engine(target, chains(backend), num_speculative_tokens=3), requests) == texts
    return target


def greedy(module, prompt, count):
    """The text of transformers, each token from a pass over all before it."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", SERVED)
def test_a_served_architecture_writes_transformers_own_text(name, tmp_path):
    save_pair(config_of(name, SERVED[name]), tmp_path, 2.0)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32, attn_implementation="eager")
    # The first goes on alone: a pass over one row is not like one over several.
    texts = {str(i): greedy(module.eval(), prompt[: 19 - 7 * i], 14 - 9 * i) for i, prompt in enumerate(PROMPTS)}
    params = [SamplingParams(temperature=0.0, max_tokens=14 - 9 * i, ignore_eos=True) for i in range(2)]
    requests = [(prompt[: 19 - 7 * i], params[i]) for i, prompt in enumerate(PROMPTS)]
    target = check_texts(tmp_path, requests, texts)
    self_drafting = make_engine(target, drafting="self", self_draft_layers=1, num_speculative_tokens=3)
    assert run(self_drafting, requests) == texts


@pytest.mark.parametrize("name", SERVED)
def test_a_served_architecture_has_the_weights_that_transformers_loads(name, tmp_path):
    save(config_of(name, SERVED[name]), tmp_path)
    source = source_of(tmp_path)
    module = CausalLM.load_module(source.directory, source.configuration, torch.bfloat16)
    check_same(_load_whole(source, torch.bfloat16, torch.device("cpu")), module)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_served_encoder_decoder_writes_transformers_own_text(name, tmp_path):
    save_pair(getattr(transformers, f"{name}Config")(**T5_SIZES), tmp_path, 3.0)
    module = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=12)
    requests = [(prompt[: 19 - 7 * i], params) for i, prompt in enumerate(PROMPTS)]
    # Its cache would have as many layers as the encoder.
    settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
    texts = {
        str(i): module.generate(torch.tensor([prompt]), **settings)[0, 1:].tolist()
        for i, (prompt, _) in enumerate(requests)
    }
    check_texts(tmp_path, requests, texts)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_be_served_is_refused_with_the_reason(name, tmp_path):
    extra, reason = REFUSED[name]
    save_or_configure(config_of(name, extra), tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def save_or_configure(config, path):
    """Write a model; of an encoder-decoder the configuration, at which it is refused."""
    if config.is_encoder_decoder:
        config.save_pretrained(path)
    else:
        save(config, path)
