from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.drafting.registry import METHODS
from engine.heads.dense_context import read_target
from engine.heads.unrolling import unroll
from engine.protocols import run_in_process
from engine.training.__main__ import main
from engine.training.head_training import add_confidence, head_acceptance, losses, weights_of
from engine.training.measured_acceptance import continue_prompts
from engine.training.new_head import HeadShape, make_head, save_head
from engine.training.small_model import load_model
from engine.verification.verifier import ModelVerifier
from tests.engine.heads.test_dflash import ANCHOR, FULL, SLIDING, block_config
from tests.engine.heads.test_eagle3 import TEXT
from tests.engine.heads.tiny_heads import backend_with_head, head_config, prefill, verify_row


@pytest.mark.parametrize("options", [["--kind", "eagle3", "--draft-vocab", "100"], ["--kind", "dspark"]])
def test_a_run_is_resumed_and_its_head_learns(corpus, target, tmp_path, options, capfd):
    command = ["head", str(corpus), "--target", str(target), "--output", str(tmp_path), "--batch-tokens", "128"]
    command += ["--continuations", "8", "--reports", "0", "--no-compile", "--block-size", "3", *options]
    assert main([*command, "--steps", "2"]) == 0
    assert main([*command, "--steps", "30"]) == 0
    assert "resuming after step 2" in capfd.readouterr().err
    assert main([*command, "--steps", "31", "--markov-rank", "3"]) == 1
    again = [*command, "--output", str(tmp_path / "more"), "--head", str(tmp_path), "--steps", "1"]
    assert main(again) == 0
    assert (tmp_path / "more" / "model.safetensors").exists()


def test_losses_are_divergence_and_variation():
    logits, target = torch.tensor([[0.0, 0.0], [3.0, -1.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    divergence, variation = losses("eagle3", logits, target)
    probs = logits[1].softmax(-1)
    assert divergence.tolist() == pytest.approx([0.0, float((0.5 * (0.5 / probs).log()).sum())], abs=1e-6)
    assert variation.tolist() == pytest.approx([0.0, float(probs[0] - 0.5)], abs=1e-6)
    both, _ = losses("dspark", logits, target)
    torch.testing.assert_close(both, 0.9 * variation + 0.1 * divergence)
    assert weights_of("eagle3", 3).diff().max() < 0
    assert weights_of("dspark", 3).tolist() == [1, 1, 1]


HEADS = {
    "eagle3 of two layers": head_config(layers=2, fc_norm=True, norm_output=True),
    "dflash": block_config(types=[FULL, SLIDING]),
    "dspark with a draft vocabulary": block_config(
        kind="dspark", draft_vocab=33, **ANCHOR, markov_rank=8, markov_head_type="rnn"
    ),
}
PROMPTS = ["the whale", "a ship and every sailor saw the", "night"]


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_the_steps_of_serving_are_those_of_training(target_path, name):
    backend = backend_with_head(target_path, HEADS[name])
    head = backend.model.head
    if getattr(head, "markov_head", None) is not None:
        head.markov_head.markov_w2.weight *= 20  # it decides
    config = EngineConfig(num_blocks=20, block_size=4, drafting="head")
    verifier = ModelVerifier(backend, config, None, METHODS["head"].make_in_target)
    (verdict,) = run_in_process(verifier.verify([prefill(verifier, verify_row(TEXT, 4))]))
    drafted = verdict.draft.token_ids
    ids = torch.tensor([TEXT + drafted])
    taps, _ = read_target(AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32), head.config.taps, ids)
    features = head.feature(taps)
    logits = unroll(head, ids, features, torch.tensor([[3, len(TEXT) - 1]]), 4).logits
    assert logits[0, 1].argmax(-1).tolist() == drafted
    alone = unroll(head, ids, features[:, : len(TEXT) - 1], torch.tensor([[len(TEXT) - 1]]), 4).logits
    torch.testing.assert_close(alone[0, 0], logits[0, 1])
    assert len(set(drafted)) > 1


@pytest.mark.parametrize(
    ("shape", "temperature"), [(HeadShape(kind="eagle3", draft_vocab=100), 0.0), (HeadShape(block_size=4), 1.0)]
)
def test_what_is_measured_and_saved_is_what_the_engine_serves(target, tmp_path, shape, temperature):
    model, tokenizer = load_model(target)
    torch.manual_seed(0)
    head = make_head(shape, model, torch.arange(model.config.vocab_size))
    for parameter in head.layers.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    if shape.kind == "dspark":
        add_confidence(head)  # serving does not read it
    save_head(tmp_path, head, model, str(target))
    torch.nn.Module.to(head, torch.bfloat16)
    torch.nn.Module.to(head, torch.float32)
    continuations = continue_prompts(model, [tokenizer(prompt)["input_ids"] for prompt in PROMPTS], 24, temperature)
    acceptance = head_acceptance(head, model, continuations, 4)
    accepted = acceptance.accepted_lengths(4)
    begins = [(begin, end) for _, begin, end in continuations.texts()]
    # One draft per token that is followed by four more; a prompt's first token has none.
    assert [len(row) for row in acceptance.lengths] == [end - 4 - max(1, begin - 1) for begin, end in begins]
    llm = LLM(draft_model=tmp_path, speculation="fixed", num_speculative_tokens=4, dtype="float32", compile="off")
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(3)]
    served = llm.generate(PROMPTS, params, show_progress=False)
    texts = [out.outputs[0].token_ids for out in served]
    assert texts == [ids[begin:].tolist() for ids, begin, _ in replace(continuations, eos_token_id=None).texts()]
    assert llm.stats.num_drafts >= len(accepted)
    # The engine also counts the rounds that max_tokens cuts short.
    assert abs(llm.stats.num_accepted_tokens - sum(accepted)) <= 4 * len(PROMPTS)
    assert temperature == 0 or sum(accepted) > 0
