"""LoRA adapters: their text is that of the target with the adapter's product added to its weights."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.errors import ModelError, RequestError
from tests.models import save_llama

pytest.importorskip("vllm", reason="`make vllm` has it")

RANK, ALPHA = 4, 8
PROMPTS = [[5, 9, 2, 33, 12, 7] * 8, [7, 3] * 20]


def save_adapter(folder, target_path, merged_path):
    """Write a random adapter, and the target that it makes."""
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    torch.manual_seed(7)
    tensors = {}
    for nth, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            first, second = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
            prefix = f"base_model.model.model.layers.{nth}.self_attn.{name}"
            tensors |= {f"{prefix}.lora_A.weight": first, f"{prefix}.lora_B.weight": second}
            with torch.no_grad():
                weight += second @ first * (ALPHA / RANK)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(merged_path)
    return str(folder)


def texts(llm, *adapters):
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True, adapter=adapter)
        for adapter in adapters
        for temperature in (0.0, 0.8)
    ]
    outputs = llm.generate(PROMPTS * len(adapters), params, show_progress=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_an_adapter_writes_as_the_merged_target_beside_the_target_itself(tmp_path):
    target = str(save_llama(tmp_path / "target", seed=1, head_dim=32))
    merged = save_llama(tmp_path / "merged", seed=1, head_dim=32)
    adapter = save_adapter(tmp_path / "adapter", target, merged)
    plain = [texts(LLM(path, "none", max_num_seqs=8), None) for path in (target, str(merged))]
    assert plain[0] != plain[1]
    settings = {"execution": "vllm", "compile": "off", "max_num_seqs": 8, "drafting": "suffix"}
    llm = LLM(target, "none", vllm={"lora_modules": {"sql": adapter}, "max_lora_rank": 8}, **settings)
    assert texts(llm, None, "sql") == [*plain[0], *plain[1]]
    assert texts(llm, "sql", None) == [*plain[1], *plain[0]], "cached prefixes are not shared"
    with pytest.raises(RequestError, match=r"adapter is 'other', the target has \['sql'\]"):
        texts(llm, "other")
    with pytest.raises(RequestError, match="prompts' log probabilities are not computed where"):
        llm.generate(PROMPTS, SamplingParams(prompt_logprobs=1), show_progress=False)
    with pytest.raises(ModelError, match="lora_modules: sql is /nowhere, which has no"):
        LLM(target, "none", vllm={"lora_modules": {"sql": "/nowhere"}}, **settings)
