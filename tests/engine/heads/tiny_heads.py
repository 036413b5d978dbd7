"""Tiny random heads over loaded tiny targets, and rows of targets that draft for themselves."""

import copy
from dataclasses import replace

import torch
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.execution.cpu.cpu_backend import CpuBackend
from engine.heads.config import HeadConfig
from engine.heads.registry import HEADS
from engine.heads.tapped import with_head
from engine.params import SamplingParams
from engine.protocols import Draft, Request, VerifyRow, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.tiny import backend_of

VOCAB = 64
GREEDY = SamplingParams(temperature=0)


def head_config(
    kind="eagle3",
    *,
    layers=1,
    hidden=32,
    width=32,
    taps=(2, 1, 1),
    draft_vocab=VOCAB,
    kv_heads=1,
    like=LlamaConfig,
    layer_types=None,
    **fields,
):
    config = like(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        rope_theta=500.0,
    )
    if layer_types is not None:
        config.layer_types, config.sliding_window = layer_types, 5
    return HeadConfig(
        kind=kind,
        layers=config,
        taps=taps,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        target_hidden_size=width,
        **fields,
    )


def random_head(model, config, *, seed=7):
    """A head with sharp random weights over a loaded target, whose embedding and last layer it shares."""
    torch.manual_seed(seed)
    lm = model.module
    head = HEADS[config.kind](config, lm.get_input_embeddings(), lm.get_output_embeddings(), model.kv_shape.layers)
    if config.kind == "mtp":
        for name in ("enorm", "hnorm", "norm", "eh_proj", "mtp_block"):
            getattr(head, name).to_empty(device="cpu")
        for norm in (module for module in head.modules() if hasattr(module, "variance_epsilon")):
            torch.nn.init.ones_(norm.weight)
        head._hidden_first, head._target_norm = False, [lm.get_decoder().norm]
    if config.draft_vocab_size < VOCAB:
        head.lm_head = torch.nn.Linear(config.layers.hidden_size, config.draft_vocab_size, bias=False)
        head.target_ids = torch.arange(config.draft_vocab_size) * min(2, VOCAB // config.draft_vocab_size)
    shared = {id(parameter) for parameter in lm.parameters()}
    with torch.no_grad():
        for parameter in head.parameters():
            if id(parameter) not in shared and parameter.dim() > 1:
                parameter.normal_(std=0.25)
            elif id(parameter) not in shared:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return head.eval().requires_grad_(False)


def backend_with_head(path, config, *, seed=7, **settings):
    """The backend of a saved target with a random head."""
    plain = backend_of(path, **settings)
    model = with_head(plain.model, random_head(plain.model, config, seed=seed))
    return CpuBackend(model, plain._source)


def alone(backend):
    """The head of a target by itself, with a cache of its own."""
    model, head = backend.model, backend.model.head
    apart = HEADS[head.config.kind](head.config, head.embed_tokens, head.lm_head, 0)
    apart.load_state_dict(head.state_dict())
    apart.target_ids = head.target_ids
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 0
    apart.eval().requires_grad_(False)
    return CpuBackend(replace(model, module=apart, config=config, head=apart), backend._source)


def features_of(verifier, block_ids, places):
    """The features of some places of a request, as bytes."""
    slots = [verifier.kv.slot(block_ids, place) for place in places]
    return memoryview(verifier.kv.states.flatten(0, 1)[slots].numpy().tobytes())


def make_verifier(backend, drafting="head", **settings):
    config = EngineConfig(num_blocks=80, block_size=4, drafting=drafting, **settings)
    return ModelVerifier(backend, config, None, METHODS[drafting].make_in_target)


def verify_row(text, num_deferred, *, first_block=1, num_blocks=10, params=GREEDY):
    """A row of a text whose last token is to be computed, and after which so many tokens are to be drafted."""
    request = Request(f"{first_block}", list(text), len(text), params)
    blocks = list(range(first_block, first_block + num_blocks))
    return VerifyRow(request, len(text) - 1, 1, blocks, Draft(num_deferred=num_deferred))


def prefill(verifier, row):
    """Compute what comes before a row; return the row."""
    run_in_process(verifier.verify([replace(row, start=0, length=row.start, draft=Draft())]))
    return row


def tapped(backend, text):
    """The outputs of the target's layers that a head reads of a text, [tokens, width] each."""
    outputs, layers = [], backend.model.module.lm.model.layers
    hooks = [layer.register_forward_hook(lambda *hooked: outputs.append(hooked[2][0])) for layer in layers]
    backend.run(build([ForwardRow(text, 0, list(range(1, 20)), 1)], backend.allocate_kv(20, 4)))
    for hook in hooks:
        hook.remove()
    return [outputs[tap - 1].view(len(text), -1) for tap in backend.model.head.config.taps]
