from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.config import AppConfig, ArgumentError, Autoscaling, Limits, api_keys, group_config
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET


@pytest.mark.parametrize("model", [AppConfig, Limits, Autoscaling])
def test_every_field_has_a_description_and_a_default(model: type[BaseModel]) -> None:
    assert not [name for name, field in model.model_fields.items() if not field.description or field.is_required()]


def test_flat_strings_are_enough() -> None:
    config = AppConfig.model_validate(
        {
            "target_model": "/models/big",
            "draft_model": "none",
            "tensor_parallel_size": "2",
            "memory_fraction": "0.25",
            "enable_prefix_caching": "false",
            "num_blocks": "none",
            "limits": '{"max_n": 2}',
        }
    )
    assert (config.tensor_parallel_size, config.memory_fraction, config.enable_prefix_caching) == (2, 0.25, False)
    assert (config.num_blocks, config.limits.max_n, config.model_name) == (None, 2, "big")


def test_typed_nested_values_are_taken_as_they_are() -> None:
    config = AppConfig.model_validate({"autoscaling": {"max_replicas": 3}, "api_keys": ["a"], "num_blocks": 7})
    assert (config.autoscaling.max_replicas, config.num_blocks, api_keys(config)) == (3, 7, ("a",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_spec_tokens": "4"}, "unknown argument num_spec_tokens; did you mean num_speculative_tokens?"),
        ({"zzz": "4"}, "unknown argument zzz"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens is 'many'"),
        ({"verification": "exact"}, "verification is 'exact'"),
        ({"drafting": "ngrm"}, "drafting is 'ngrm': Input should be 'auto', 'none' or 'model'"),
        ({"drafting": "model", "draft_model": "none"}, "drafting is 'model', which needs a draft_model"),
        ({"drafting": "model", "target_model": "/big"}, "drafting is 'model', which needs a draft_model"),
        ({"tensor_parallel_size": "0"}, "tensor_parallel_size is '0'"),
        ({"limits": {"max_m": 1}}, "unknown argument limits.max_m"),
        ({"limits": "{"}, "limits is '{'"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        AppConfig.model_validate(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_that_do_not_go_together_are_named_without_all_the_others() -> None:
    with pytest.raises(ArgumentError) as caught:
        AppConfig.model_validate({"drafting": "model", "draft_model": "none", "max_num_seqs": 3})
    assert str(caught.value) == "drafting is 'model', which needs a draft_model, and there is none"


@pytest.mark.parametrize(
    ("arguments", "target", "draft"),
    [
        ({}, str(BUNDLED_TARGET), str(BUNDLED_DRAFT)),
        ({"draft_model": "none"}, str(BUNDLED_TARGET), None),
        ({"num_speculative_tokens": 0}, str(BUNDLED_TARGET), None),
        ({"speculation": "off"}, str(BUNDLED_TARGET), None),
        ({"drafting": "none"}, str(BUNDLED_TARGET), None),
        ({"drafting": "model"}, str(BUNDLED_TARGET), str(BUNDLED_DRAFT)),
        ({"drafting": "model", "draft_model": "none", "speculation": "off"}, str(BUNDLED_TARGET), None),
        ({"target_model": "/big", "draft_model": "/small", "drafting": "none"}, "/big", None),
        ({"target_model": "/big"}, "/big", None),
        ({"target_model": "/big", "draft_model": "/small"}, "/big", "/small"),
    ],
)
def test_which_models_are_loaded(arguments: dict[str, object], target: str, draft: str | None) -> None:
    config = group_config(AppConfig.model_validate(arguments))
    assert config.target.path == target
    assert (config.draft and config.draft.path) == draft
    assert (config.engine.num_speculative_tokens == 0) == (draft is None)


def test_every_engine_setting_reaches_the_group() -> None:
    wanted = {
        "num_speculative_tokens": 3,
        "speculation": "fixed",
        "drafting": "model",
        "verification": "rejection",
        "max_num_seqs": 5,
        "max_num_batched_tokens": 77,
        "max_queued_requests": 9,
        "max_model_len": 99,
        "block_size": 8,
        "num_blocks": 11,
        "memory_fraction": 0.125,
        "enable_prefix_caching": False,
    }
    engine = group_config(AppConfig.model_validate(wanted)).engine
    assert {name: getattr(engine, name) for name in wanted} == wanted


def test_keys_come_from_everywhere_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("b\nc\n")
    monkeypatch.setenv("PACELINE_API_KEY", "c d")
    config = AppConfig.model_validate({"api_keys": ["a"], "api_key_file": str(tmp_path / "keys")})
    assert api_keys(config) == ("a", "b", "c", "d")
    assert "SecretStr('a')" not in repr(config)


@pytest.mark.parametrize("content", ["", None, "schlüssel"])
def test_a_key_file_that_is_of_no_use_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(ArgumentError, match="key"):
        api_keys(AppConfig.model_validate({"api_key_file": str(tmp_path / "keys")}))


@pytest.mark.parametrize("arguments", [{"run_ahead": "on"}, {"tensor_parallel_size": 2}, {"device": "cuda"}])
def test_one_core_is_refused_to_what_computes_at_once(arguments):
    assert group_config(AppConfig.model_validate({"pinning": "on"})).target.pinned
    with pytest.raises(ArgumentError, match="pinning is on"):
        AppConfig.model_validate({"pinning": "on", **arguments})
