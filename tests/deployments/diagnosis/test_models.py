import json
import shutil
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.diagnosis import models
from deployments.diagnosis.models import known_draft, pair_findings, path_findings, weight_file_bytes
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET
from engine.execution.memory import CacheSize
from tests.engine.heads.files import head_settings, head_tensors, save_head
from tests.models import save_llama


def config(**settings: str) -> AppConfig:
    return AppConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("/models/Llama-3.1-8B/", "meta-llama/Llama-3.2-1B"),
        ("google/flan-t5-xl", "google/flan-t5-small"),
        ("google/gemma-2-27b-it", None),
    ],
)
def test_a_draft_is_known_by_the_targets_name(target, draft):
    assert known_draft(target) == draft


def test_a_missing_target_is_an_error_that_says_what_to_pull():
    (target,) = (finding for finding in path_findings(config(target_model="Qwen/Qwen3-8B")) if finding.level == "error")
    assert target.subject == "target"
    assert "`paceline pull Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B`" in target.advice


def test_a_target_without_its_known_draft_is_a_warning(tmp_path: Path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    found = {finding.subject: finding for finding in path_findings(config(target_model=str(folder)))}
    assert (found["target"].level, found["draft"].level) == ("ok", "warning")
    assert "draft_model=Qwen/Qwen3-0.6B" in found["draft"].advice
    for settings in ({"draft_model": "none"}, {"speculation": "off"}):
        assert [f.level for f in path_findings(config(target_model=str(folder), **settings))] == ["ok"]


def test_the_bundled_pair_is_well():
    assert [finding.level for finding in path_findings(config())] == ["ok", "ok"]
    (pair,) = pair_findings(config())
    assert (pair.level, pair.found[:20]) == ("ok", "4096 tokens in each,")
    sizes = [(path / "model.safetensors").stat().st_size for path in (BUNDLED_TARGET, BUNDLED_DRAFT)]
    assert weight_file_bytes(config()) == sum(sizes)


def test_each_of_several_drafts_is_counted(tmp_path: Path):
    other = shutil.copytree(BUNDLED_DRAFT, tmp_path / "draft")
    one, two = config(draft_model=str(BUNDLED_DRAFT)), config(draft_model=f"{BUNDLED_DRAFT},{other}")
    assert [finding.level for finding in path_findings(two)] == ["ok", "ok", "ok"]
    assert next(pair_findings(two)).found.startswith("4096 tokens in each,")
    assert weight_file_bytes(two) - weight_file_bytes(one) == (other / "model.safetensors").stat().st_size


def test_a_model_of_which_a_part_is_missing_is_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (target,) = path_findings(config(target_model=str(tmp_path)))
    assert target.level == "error"
    assert "model-00002-of-00002.safetensors" in target.found


def test_another_tokenizer_is_well_if_it_shares_tokens(tmp_path: Path):
    draft = shutil.copytree(BUNDLED_DRAFT, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 4096, "content": "<new>"})
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    (pair,) = pair_findings(config(draft_model=str(draft)))
    assert pair.level == "ok"
    assert pair.found.startswith("4096 tokens, of which the draft has 4096, by other ids, weights of")
    tokenizer["model"] |= {"vocab": {f"x{token}": i for token, i in tokenizer["model"]["vocab"].items()}, "merges": []}
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    (pair,) = pair_findings(config(draft_model=str(draft)))
    assert pair.level == "error"
    assert "at least half is needed" in pair.found
    assert "drafting=suffix" in pair.advice


def test_the_memory_plan_counts_every_process_on_this_machine(monkeypatch):
    monkeypatch.setattr(models, "plan_cache", lambda free, workers, engine, device: CacheSize(len(workers), 0))
    assert ", 48 tokens fit" in next(pair_findings(config(tensor_parallel_size="2"))).found


def test_a_draft_with_a_long_context_takes_no_more_of_the_cache(tmp_path: Path):
    draft = shutil.copytree(BUNDLED_DRAFT, tmp_path / "draft")
    settings = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 2**20}))
    found = [next(pair_findings(config(draft_model=model))).found for model in ("auto", str(draft))]
    assert found[0] == found[1]


def test_models_that_do_not_fit_are_an_error():
    for name, value in (("memory_fraction", "1e-9"), ("max_model_len", "100000")):
        for execution in ("torch", "vllm"):
            (pair,) = pair_findings(config(**{name: value}, execution=execution))
            assert (pair.level, name in pair.found) == ("error", True)


def test_what_vllm_does_not_compute_is_an_error():
    assert next(pair_findings(config(execution="vllm"))).level == "ok"
    (pair,) = pair_findings(config(execution="vllm", drafting="tree"))
    assert (pair.level, "computed by vLLM" in pair.found) == ("error", True)


def test_a_head_is_found_and_counted_with_its_target(tmp_path: Path):
    target = str(save_llama(tmp_path / "target", seed=0))
    settings = {"draft_model": save_head(tmp_path / "head", head_settings(target), head_tensors()), "device": "cpu"}
    findings = list(path_findings(config(**settings)))
    assert [(finding.level, finding.subject) for finding in findings] == [("ok", "target"), ("ok", "head")]
    for drafting, execution in (("auto", "torch"), ("head_worker", "torch"), ("head_worker", "vllm")):
        (pair,) = pair_findings(config(**settings, drafting=drafting, execution=execution))
        assert pair.level == "ok", pair.found
    (pair,) = pair_findings(config(**settings, execution="vllm"))
    assert (pair.level, "drafting must be model, head_worker, ngram" in pair.found) == ("error", True)
    (missing,) = [one for one in path_findings(config(draft_model="org/head")) if one.level == "error"]
    assert missing.advice == "`paceline pull org/head` downloads what is missing"
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("target", "head")]
    assert weight_file_bytes(config(**settings)) == sum(sizes)
    save_head(tmp_path / "head", head_settings(target, norm_before_residual=None), head_tensors())
    (pair,) = pair_findings(config(**settings))
    assert (pair.level, "norm_before_residual is missing" in pair.found) == ("error", True)
