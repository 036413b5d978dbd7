"""LLM: the settings it takes, the prompts it continues, the requests it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from engine.config import EngineConfig, ModelConfig
from engine.drafting.assembly import assemble
from engine.drafting.copying.suffix import SuffixDrafter
from engine.errors import ConfigError, ModelError, RequestError
from engine.execution.registry import make_backend
from engine.models.registry import open_model
from engine.sampling.grammar_text import from_regex
from tests.engine.heads.files import head_settings, save_head
from tests.models import save_llama

PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = save_llama(tmp_path_factory.mktemp("target"), seed=1)
    return target, save_llama(tmp_path_factory.mktemp("draft"), seed=1, noise=0.1)


def make_llm(target: Path, draft: Path | str = "none", **settings: Any) -> LLM:
    return LLM(target, draft, **({"dtype": "float32", "device": "cpu", "compile": "off", "num_threads": 1} | settings))


@pytest.fixture(scope="module")
def llm(models: tuple[Path, Path]) -> LLM:
    return make_llm(*models, speculation="fixed", max_queued_requests=2, max_num_seqs=2, max_model_len=64)


def token_ids(llm: LLM, prompts: Any, params: SamplingParams = PARAMS) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(prompts, params)]


def test_without_a_draft_model_text_that_occurred_before_is_drafted(models: tuple[Path, Path]) -> None:
    prompts = [[2, 3, 4] * 4, [5, 6, 7, 8] * 3]
    few = {2: 100.0, 3: 100.0, 4: 100.0}  # so that n-grams come again
    params = SamplingParams(temperature=0.7, max_tokens=60, seed=3, ignore_eos=True, logit_bias=few)
    copying = make_llm(models[0], speculation="fixed", num_blocks=64)
    assert type(copying.engine.drafter.drafter) is SuffixDrafter
    plain = token_ids(make_llm(models[0], drafting="none", num_blocks=64), prompts, params)
    assert token_ids(copying, prompts, params) == plain
    assert token_ids(copying, prompts, params) == plain
    assert copying.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("drafting", ["model", "tree", "model+suffix"])
def test_of_several_drafts_each_request_gets_the_one_that_suits_it(models: tuple[Path, Path], drafting: str) -> None:
    """The second draft is the better one; memory is planned for both."""
    target, draft = models
    prompts, params = [[2 + seed, 3, 4] for seed in range(4)], replace(PARAMS, temperature=0.7, max_tokens=40)
    unlike = save_llama(target.parent / f"unlike {drafting}", seed=7)
    both = make_llm(target, f"{unlike},{draft}", drafting=drafting, speculation="fixed")
    plain = make_llm(target, drafting="none", num_blocks=200)
    assert token_ids(both, prompts, params) == token_ids(plain, prompts, params)
    counts = both.engine.planner.num_tokens_by_draft
    assert counts[1, "accepted"] > counts[0, "accepted"]
    assert 0 < counts[0, "verified"] < counts[1, "verified"]


def test_of_several_drafts_the_one_that_cannot_be_loaded_is_named(models: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="model directory /missing does not exist"):
        make_llm(models[0], f"{models[1]},/missing")


def test_blocks_that_no_memory_has_room_for_are_refused_by_their_number(models: tuple[Path, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"no room for 1,\d{3},\d{3},\d{3},\d{3} KV blocks of 16 tokens; lower num_blocks"
    ):
        make_llm(models[0], num_blocks=10**12)


def test_texts_go_on_to_the_end_of_scaled_positions_and_drafts_to_that_of_their_own(tmp_path: Path) -> None:
    """Qwen's recipe for YaRN, over 64 positions; the draft model has these 64."""
    folders = [save_llama(tmp_path / name, seed=1, positions=64) for name in ("target", "draft")]
    file, rope = folders[0] / "config.json", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": None, "rope_scaling": rope}))
    with pytest.raises(ModelError, match=r"max_model_len is 257, but .*/target takes 256 tokens"):
        make_llm(*folders, max_model_len=257)
    with pytest.raises(ModelError, match="max_model_len is 257, but"):
        assemble(open_model(ModelConfig(str(folders[0]))), None, EngineConfig(max_model_len=257))
    llm = make_llm(*folders, max_model_len=256, speculation="fixed")
    prompt, params = [5, 6, 7], SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    [[tokens]] = token_ids(llm, [prompt], params)
    module = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    expected = module.generate(torch.tensor([prompt]), max_length=256, do_sample=False, eos_token_id=None)
    assert [*prompt, *tokens] == expected[0].tolist()
    assert 0 < llm.stats.num_accepted_tokens < 64


def test_an_llm_takes_blocks_for_its_targets_context_and_few_on_a_cpu(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", seed=1, positions=512)
    draft = save_llama(tmp_path / "draft", seed=1, positions=16_384)
    config = make_llm(target, draft).engine.config
    assert (config.max_model_len, config.num_blocks) == (512, 32 * 17)


def test_a_text_ends_at_the_end_of_the_tokenizer_that_the_configuration_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_llama(tmp_path, seed=1)
    [[tokens]] = token_ids(make_llm(target, num_blocks=64), [[2, 3]], replace(PARAMS, temperature=0.0))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    tokenizer.eos_token = f"t{tokens[2]}"
    tokenizer.save_pretrained(target)
    llm = make_llm(target, num_blocks=64)
    [result] = llm.generate([[2, 3]], SamplingParams(temperature=0, max_tokens=6))
    output = result.outputs[0]
    assert (output.finish_reason, output.token_ids) == ("stop", tokens[: tokens.index(tokens[2]) + 1])
    assert f"its tokenizer ends a text with 't{tokens[2]}', id {tokens[2]}, its configuration with [1]" in caplog.text


def test_layers_that_a_target_does_not_have_are_refused_before_it_is_loaded(models: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"is 2; it must be at most 1, because .* has 2 layers"):
        make_llm(models[0], drafting="self", self_draft_layers=2)


def test_more_prompts_than_the_queue_takes_are_all_continued(llm: LLM) -> None:
    prompts = [[2 + i, 3, 4] for i in range(7)]
    together = token_ids(llm, prompts)
    assert together == [token_ids(llm, [prompt])[0] for prompt in prompts]
    assert not llm.engine.has_work


def test_a_prompt_has_n_continuations_with_seeds_of_their_own(llm: LLM) -> None:
    (several,) = token_ids(llm, [[2, 3]], SamplingParams(max_tokens=6, seed=3, n=3, ignore_eos=True))
    for index, output in enumerate(several):
        (alone,) = token_ids(llm, [[2, 3]], SamplingParams(max_tokens=6, seed=3 + index, ignore_eos=True))
        assert alone == [output]
    assert len(token_ids(llm, [[2, 3]], SamplingParams(max_tokens=6, seed=2**63 - 1, n=2))[0]) == 2


def test_a_prompt_may_be_written_as_for_vllm(llm: LLM) -> None:
    (expected,) = token_ids(llm, [[5]])
    for prompt in ([5], numpy.array([5]), torch.tensor([5]), "t5", {"prompt": "t5"}, {"prompt_token_ids": (5,)}):
        assert token_ids(llm, prompt) == [expected], prompt
        assert token_ids(llm, [prompt, prompt]) == [expected] * 2, prompt
    (result,) = llm.generate(numpy.array([2, 5]))
    assert [type(token) for token in result.prompt_token_ids] == [int, int]
    assert llm.generate([]) == []
    (to_the_end,) = llm.generate([2, 5], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(to_the_end.outputs[0].token_ids) == llm.engine.max_model_len - 2


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[2], [3]], [PARAMS], "2 prompts came with 1"),
        ([[2], []], PARAMS, "the prompt is empty"),
        ([[2], [3]], [PARAMS, SamplingParams(grammar=from_regex("(a"))], "cannot follow a grammar"),
        ([[2], 3], PARAMS, "a prompt is 3, allowed are"),
        (b"ab", PARAMS, "a prompt is b'ab'"),
        ("t2 \ud83c", PARAMS, "holds half of a character"),
        ([[2], [True]], PARAMS, r"a prompt is \[True\]"),
        ([[2], {"prompt": "t2", "cache_salt": "x"}], PARAMS, "cache_salt"),
        ([[2], [10**30]], PARAMS, "token id 10"),
        ([[2]], {"n": 1}, "params is {'n': 1}, allowed are SamplingParams"),
    ],
)
def test_after_a_refusal_nothing_is_left_in_the_engine(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


def test_requests_without_a_seed_derive_theirs_from_the_llms(models: tuple[Path, Path]) -> None:
    unseeded = SamplingParams(max_tokens=8, ignore_eos=True)
    first, same, other = (
        token_ids(make_llm(models[0], seed=seed, num_blocks=64), [[2], [2]], unseeded) for seed in (0, 0, 50)
    )
    assert first == same
    assert first != other
    assert first[0] != first[1]


@pytest.mark.parametrize(("verification", "invariant"), [("coupled", False), ("rejection", True)])
def test_only_a_draft_that_is_judged_by_its_distribution_is_invariant(
    models: tuple[Path, Path], verification: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(options.get("invariant", True))
        return make_backend(*arguments, **options)

    monkeypatch.setattr("engine.drafting.assembly.make_backend", make)
    make_llm(*models, verification=verification, num_blocks=64)
    assert made == [True, invariant]


def test_a_head_on_a_draft_worker_needs_one(models: tuple[Path, Path], tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", head_settings(str(models[0])), {})
    with pytest.raises(ConfigError, match="drafting is 'head_worker', but there is no draft worker in this process"):
        LLM(draft_model=head, drafting="head_worker")
