from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from cluster.config import GroupConfig
from deployments.config import AppConfig, ArgumentError, Autoscaling, Limits, PoolSize, api_keys
from deployments.sections import group_config, ingress_config, pool_config
from engine.config import PAIR_SETTINGS, PairConfig, make_pair
from tests.engine.heads.files import head_settings, save_head

SELF_DRAFT = {"drafting": "self", "self_draft_layers": 3}


@pytest.mark.parametrize("model", [AppConfig, Limits, Autoscaling, PoolSize])
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
    pair = config.pair
    assert (config.tensor_parallel_size, pair.memory_fraction, pair.enable_prefix_caching) == (2, 0.25, False)
    assert (pair.num_blocks, config.limits.max_n, config.model_name) == (None, 2, "big")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_spec_tokens": "4"}, "unknown argument num_spec_tokens; did you mean num_speculative_tokens?"),
        ({"autoscaling": '{"min_replicas": 3, "max_replicas": 2}'}, "autoscaling: max_replicas 2 < min_replicas 3"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens is 'many'"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5: Input should be less than or equal to 1"),
        ({"self_draft_layers": "4"}, "self_draft_layers is set, but drafting is 'auto', which does not draft with the"),
        ({**SELF_DRAFT, "run_ahead": "on"}, "run_ahead is on, but drafting is 'self'"),
        ({"pair.num_blocks": 8}, "unknown argument pair.num_blocks; did you mean num_blocks?"),
        ({"limits": {"max_m": 1}}, "unknown argument limits.max_m"),
        ({"limits": "{"}, "limits is '{'"),
        ({"draft_pool": '{"replicas": 3, "max_replicas": 2}'}, "draft_pool: max_replicas 2 < replicas 3"),
        ({"draft_pool": {"replicas": 0}}, "draft_pool.replicas is 0"),
        ({"draft_pool": {}, "draft_model": "none"}, "draft_pool is set, but draft_model is none, drafting is auto"),
        ({"draft_pool": {}, "speculation": "off"}, "speculation is off, num_speculative_tokens is 4: no draft worker"),
        ({"draft_pool": {}, "num_speculative_tokens": "0"}, "num_speculative_tokens is 0: no draft worker is needed"),
        ({"draft_learning": "on", "drafting": "suffix"}, "draft_learning is on, but drafting is 'suffix' and"),
        (
            {"draft_learning": "on", "drafting": "mtp"},
            "nothing drafts in a draft worker; a trained head does so by head",
        ),
        ({"draft_learning": "on", "verification": "block"}, "verification 'block': it learns from the noise that"),
        ({"draft_learning": "on", "draft_model": "/a,/b"}, "draft_model names 2 drafts; only a single one learns"),
        ({"draft_learning_share": "0"}, "draft_learning_share is '0': Input should be greater than 0"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        AppConfig.model_validate(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_group_is_what_the_defaults_say_when_nothing_is_set() -> None:
    pair = PairConfig()
    assert group_config(AppConfig()) == GroupConfig(pair.target, pair.draft, replace(pair.engine, drafting="model"))


@pytest.mark.parametrize("form", [lambda value: value, str], ids=["typed", "words"])
def test_settings_of_the_pair_are_arguments_and_reach_the_group(form: Callable[[object], object]) -> None:
    settings = {
        "target_model": "org/big@one",
        "draft_model": "/small",
        "draft_quantization": "int4",
        "num_threads": 3,
        "drafting": "tree",
        "memory_fraction": 0.125,
        "enable_prefix_caching": False,
    }
    pair = make_pair(**settings)
    config = AppConfig.model_validate({name: form(value) for name, value in settings.items()})
    assert config.pair == pair
    group = group_config(config)
    assert (group.target, group.draft, group.engine) == (pair.target, pair.draft, pair.engine)
    group = group_config(AppConfig.model_validate({name: form(value) for name, value in SELF_DRAFT.items()}))
    assert (group.engine.drafting, group.engine.self_draft_layers) == ("self", 3)
    assert (group.draft, group.has_draft_worker, group.method.runs_in) == (None, False, "target")


def test_none_on_the_command_line_is_none_where_a_setting_may_be_none_and_a_word_elsewhere() -> None:
    optional = {name: "none" for name, setting in PAIR_SETTINGS.items() if setting.default is None}
    assert optional
    pair = AppConfig.model_validate(optional | {"draft_model": "none"}).pair
    assert {getattr(pair, name) for name in optional} == {None}
    assert (pair.draft_model, pair.draft) == ("none", None)


def test_every_setting_of_a_group_or_an_ingress_that_an_argument_names_reaches_it() -> None:
    both = {"tensor_parallel_size": 2, "start_timeout_s": 4.0, "log_format": "json"}
    groups = both | {"run_ahead": "on", "round_timeout_s": 3.0, "hang_timeout_s": 5.0}
    groups |= {"draft_learning": "on", "draft_learning_share": 0.25, "draft_learning_path": Path("/learned")}
    labels = {"target": {"pool": "big"}, "draft": {"pool": "small"}}
    group = group_config(AppConfig.model_validate(groups | {"label_selector": labels}))
    assert {name: getattr(group, name) for name in groups} == groups
    assert (group.target_label_selector, group.draft_label_selector) == ({"pool": "big"}, {"pool": "small"})
    ingresses = both | {"stream_interval_s": 1.0, "cors_allow_origins": ("*",), "limits": Limits(max_n=2)}
    config = AppConfig.model_validate({"target_model": "org/big@one", "verification": "block", **ingresses})
    ingress = ingress_config(config)
    assert {name: getattr(ingress, name) for name in ingresses} == ingresses
    assert (ingress.target, ingress.verification, ingress.model_name) == (config.pair.target, "block", "big")


def test_keys_come_from_everywhere_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("b\nc\n")
    monkeypatch.setenv("PACELINE_API_KEY", "c d")
    config = AppConfig.model_validate({"api_keys": ["a"], "api_key_file": str(tmp_path / "keys")})
    assert api_keys(config) == ("a", "b", "c", "d")
    assert "SecretStr('a')" not in repr(config)


def test_keys_share_what_a_draft_learns_only_if_they_share_anyway() -> None:
    settings = {"draft_learning": "on", "api_keys": ["a", "b"]}
    with pytest.raises(ArgumentError, match="draft_learning is on with 2 api_keys"):
        api_keys(AppConfig.model_validate(settings))
    assert api_keys(AppConfig.model_validate(settings | {"share_between_keys": True})) == ("a", "b")
    assert api_keys(AppConfig.model_validate(settings | {"api_keys": ["a", "a"]})) == ("a",)


def test_keys_of_the_wrong_form_are_refused_without_being_shown() -> None:
    with pytest.raises(ArgumentError, match="api_keys") as error:
        AppConfig.model_validate({"api_keys": [b"secret", {"secret": 1}]})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("content", ["", None, "schlüssel"])
def test_a_key_file_that_is_of_no_use_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(ArgumentError, match="key"):
        api_keys(AppConfig.model_validate({"api_key_file": str(tmp_path / "keys")}))


def test_a_head_goes_with_the_target_of_a_group_and_names_what_is_served(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", head_settings("org/big"), {})
    config = AppConfig.model_validate({"draft_model": head, "run_ahead": "auto"})
    group, ingress = group_config(config), ingress_config(config)
    assert (group.target.path, group.target.head, group.has_draft_worker) == ("org/big", head, False)
    assert (ingress.target.path, ingress.target.head, ingress.model_name) == ("org/big", None, "big")
    learning = {"draft_model": head, "drafting": "head_worker", "draft_learning": "on"}
    assert group_config(AppConfig.model_validate(learning)).has_draft_worker
    with pytest.raises(ArgumentError, match=r"drafting is head_worker, .*: its head reads what one target computes"):
        AppConfig.model_validate({"draft_model": head, "drafting": "head_worker", "draft_pool": {}})
    with pytest.raises(ArgumentError, match="run_ahead is on, but drafting is 'head'"):
        AppConfig.model_validate({"draft_model": head, "run_ahead": "on"})


@pytest.mark.parametrize("value", ['{"replicas": 2}', {"replicas": 2}])
def test_a_pool_of_drafts_reaches_the_group_as_a_lease_instead_of_a_worker(value: object) -> None:
    config = AppConfig.model_validate({"draft_pool": value})
    assert config.draft_pool == PoolSize(replicas=2)
    group = group_config(config)
    assert (group.draft_pool, group.has_draft_worker, group.places_draft_worker) == (True, True, False)
    for none in ("none", None):
        assert AppConfig.model_validate({"draft_pool": none}) == AppConfig()
    assert not group_config(AppConfig()).draft_pool


def test_a_draft_worker_of_a_pool_reads_what_the_draft_is_made_from_and_no_more() -> None:
    settings = {"target_model": "org/big@one", "draft_model": "/small", "draft_pool": {}, "run_ahead": "on"}
    settings |= {"label_selector": {"draft": {"pool": "small"}}, "hang_timeout_s": 3.0, "log_format": "json"}
    settings |= {"draft_learning": "on", "draft_learning_share": 0.25, "draft_learning_path": "/learned"}
    group = group_config(AppConfig.model_validate(settings))
    pool = pool_config(group)
    shared = ["draft", "engine", "run_ahead", "draft_pool", "draft_label_selector", "hang_timeout_s", "log_format"]
    shared += ["draft_learning", "draft_learning_share", "draft_learning_path"]
    assert [getattr(pool, name) for name in shared] == [getattr(group, name) for name in shared]
    assert (pool.target.path, pool.target.revision) == ("org/big", "one")
    unread = {"target_quantization": "int8", "tensor_parallel_size": 4, "round_timeout_s": 9.0}
    assert pool_config(group_config(AppConfig.model_validate(settings | unread))) == pool
