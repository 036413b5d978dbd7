import json
import shutil
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import BUNDLED_TARGET
from engine.errors import ModelMismatchError
from engine.training.measured_acceptance import Acceptance, check_same_vocabulary, continue_prompts
from engine.training.small_model import Size, build_model, load_model

PROMPTS = ["the whale", "a ship and every sailor saw the", "night"]


def test_rounds_end_at_the_first_disagreement_and_a_cut_round_is_left_out() -> None:
    yes, no = True, False
    acceptance = Acceptance.of_agreements([[yes, yes, no, yes, no, yes, yes, yes, yes]])
    assert acceptance.lengths == [[2, 1, 0, 1, 0, 4, 3, 2, 1]]
    assert acceptance.accepted_lengths(2) == [2, 1, 2]
    assert acceptance.per_position(2) == pytest.approx([1.0, 2 / 3])
    assert acceptance.mean_acceptance_length(2) == pytest.approx(2 + 2 / 3)
    assert Acceptance([[2, 0, 2]], reach=2).accepted_lengths(2) == [2], "every place is followed by two tokens"
    assert Acceptance([]).mean_acceptance_length(4) == 1.0


def test_padding_changes_no_continuation_and_a_target_accepts_everything_from_itself(target: Path) -> None:
    model, tokenizer = load_model(target)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    together = continue_prompts(model, prompts, 24, 0.7)
    assert together.acceptance(model).per_position(1) == [1.0]
    for i, prompt in enumerate(prompts):
        alone = continue_prompts(model, [prompt], 24, 0.7, first_seed=i)
        assert torch.equal(alone.token_ids[0, -24:], together.token_ids[i, -24:])


def test_what_is_measured_is_what_the_engine_serves(target: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(target)
    draft = build_model(Size.parse("1x32", context=64), tokenizer, seed=1)
    draft.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    measured = continue_prompts(model, prompts, 24, 1.0)
    llm = LLM(target, tmp_path, num_speculative_tokens=4, dtype="float32", compile="off")
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(3)]
    served = llm.generate(prompts, params, show_progress=False)
    assert [out.outputs[0].token_ids for out in served] == measured.token_ids[:, -24:].tolist()
    accepted = measured.acceptance(draft).accepted_lengths(4)
    # The engine also counts the round that max_tokens cuts short.
    assert abs(llm.stats.num_accepted_tokens - sum(accepted)) <= 4 * len(prompts)


def test_a_draft_of_other_ids_is_refused(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_TARGET / "config.json", tmp_path)
    content = json.loads((BUNDLED_TARGET / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, token_id in vocabulary.items() if token_id in (40, 41))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelMismatchError, match="has other token ids than the target"):
        check_same_vocabulary(BUNDLED_TARGET, tmp_path)
