"""Settings: one definition, refused in one line where they do not fit."""

from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    PAIR_SETTINGS,
    VLLM_BLOCK_SIZE,
    EngineConfig,
    EngineSettings,
    ModelConfig,
    PairConfig,
    make_pair,
)
from engine.errors import ConfigError


def test_every_setting_has_a_docstring_and_a_default() -> None:
    assert PAIR_SETTINGS.keys() == {setting.name for setting in fields(PairConfig)}
    assert not [name for name, setting in PAIR_SETTINGS.items() if setting.is_required() or not setting.description]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65: Input should be less than or equal to 64"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan: Input should be less than or equal to 1"),
        (
            {"verification": "exact"},
            "verification is 'exact': Input should be 'coupled', 'rejection', 'block' or 'k_sequential' or "
            r"String should match pattern '^[\w.]+:\w+$'",
        ),
        ({"num_spec_tokens": 4}, "unknown argument num_spec_tokens; did you mean num_speculative_tokens?"),
        ({"zzz": 4}, "unknown argument zzz"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pair(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "target", "draft"),
    [
        ({}, BUNDLED_TARGET, BUNDLED_DRAFT),
        ({"draft_model": "none"}, BUNDLED_TARGET, None),
        ({"draft_model": "/small"}, BUNDLED_TARGET, "/small"),
        ({"target_model": "/big"}, "/big", None),
        ({"target_model": Path("/big"), "draft_model": Path("/small")}, "/big", "/small"),
    ],
)
def test_which_models_are_meant(settings: dict[str, object], target: Path | str, draft: Path | str | None) -> None:
    pair = make_pair(**settings)
    assert pair.target.path == str(target)
    assert (pair.draft and pair.draft.path) == (draft and str(draft))


def test_every_setting_reaches_the_models_and_the_engine() -> None:
    settings = {
        "target_model": "org/big@one",
        "draft_model": "/small",
        "target_quantization": "int8",
        "draft_quantization": "int4",
        "execution": "vllm",
        "vllm": {"seed": 7},
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
        "device": "cpu",
        "compile": "off",
        "num_threads": 3,
        "num_speculative_tokens": 3,
        "speculation": "fixed",
        "drafting": "tree",
        "self_draft_layers": 2,
        "verification": "rejection",
        "max_num_seqs": 5,
        "max_num_batched_tokens": 77,
        "max_queued_requests": 9,
        "max_model_len": 99,
        "num_blocks": 11,
        "memory_fraction": 0.125,
        "enable_prefix_caching": False,
    }
    assert settings.keys() == PAIR_SETTINGS.keys()
    assert all(settings[name] != setting.default for name, setting in PAIR_SETTINGS.items())
    pair = make_pair(**settings)
    loading = {"dtype": "float16", "kv_cache_dtype": "fp8", "device": "cpu", "compile": "off", "num_threads": 3}
    by_vllm = {"execution": "vllm", "vllm": settings["vllm"]}
    assert pair.target == ModelConfig("org/big", "one", quantization="int8", **loading, **by_vllm)
    assert pair.draft == ModelConfig("/small", quantization="int4", **loading)
    assert type(pair.engine) is EngineConfig
    bounds = {setting.name: settings[setting.name] for setting in fields(EngineSettings)}
    assert pair.engine == EngineConfig(**bounds, block_size=VLLM_BLOCK_SIZE)


def test_an_at_sign_in_a_directory_is_no_revision(tmp_path: Path) -> None:
    (tmp_path / "model@2").mkdir()
    path = str(tmp_path / "model@2")
    assert make_pair(target_model=path).target == ModelConfig(path, compile="auto")
