import functools
import logging
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.config import ModelConfig
from engine.execution.cpu.compilation import packages as compilation
from engine.execution.cpu.kernels import library as kernels
from engine.execution.vllm.arguments import set_environment
from engine.sampling.grammar import Grammars
from engine.verification.verifier import ModelVerifier
from tests.engine.tiny import backend_of, source_of
from tests.engine.tokenizers import END, json_tokenizer, saved
from tests.fakes import sharpen

VOCAB = 64


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def many_starts(execution):
    """Let vLLM start again in this process: in 0.32, what it does here fails the second time, beside numba."""
    if execution == "vllm":
        set_environment(ModelConfig("", execution="vllm"))
        from vllm.platforms.cpu import CpuPlatform

        once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
        CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def cuda(monkeypatch):
    """A process whose current device is the second of its GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def save_llama(path, *, seed, layers=2, hidden=32, head_dim=None):
    """A random Llama with sharp distributions: weights as initialised would make every token alike."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim or hidden // 4,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sharpen(model)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory, execution):
    # vLLM's kernels for CPUs take no smaller heads.
    return save_llama(tmp_path_factory.mktemp("target"), seed=1, head_dim=32 if execution == "vllm" else None)


@pytest.fixture(scope="session")
def make_verifier(target_path, execution):
    """Makes the target's verifier: over a loaded backend, or over vLLM, which loads the same files."""
    if execution == "torch":
        return ModelVerifier
    from engine.execution.vllm.vllm_verifier import VllmVerifier

    source = source_of(target_path, execution="vllm")
    return lambda _model, config, grammars, _make_drafter: VllmVerifier(source, config, grammars, None)


@pytest.fixture(scope="session")
def target(target_path):
    return backend_of(target_path)


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    path = save_llama(tmp_path_factory.mktemp("draft"), seed=2, layers=1, hidden=16)
    return backend_of(path)


@pytest.fixture(scope="session")
def make_grammars(tmp_path_factory):
    """Makes what one process has; drafter and verifier get one each, as on the wire."""
    source = saved(json_tokenizer(), tmp_path_factory.mktemp("json"))
    return lambda: Grammars(source, vocab_size=VOCAB, eos_token_ids=[END])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep packages in one folder for all test processes of the session: compiling takes time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(folder / "compiled"))


@pytest.fixture
def library(cache):
    """The library of kernels, loaded; its path."""
    if not compilation.has_compiler():
        pytest.skip("there is no C++ compiler")
    path = compilation.kernels_path()
    compilation.compile_once(path, compilation.compile_kernels)
    kernels.load(path)
    return path
