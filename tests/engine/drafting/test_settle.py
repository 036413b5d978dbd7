"""Settling: the method and the models that a pair's settings come to, and what is refused."""

from dataclasses import replace

import pytest

from engine.config import BUNDLED_DRAFT, BUNDLED_HEAD, BUNDLED_TARGET, EngineConfig, ModelConfig, PairConfig
from engine.drafting.registry import METHODS, Method
from engine.drafting.settle import check_kinds, check_run_ahead, choose_method, settle
from engine.errors import ConfigError, ModelError, ModelMismatchError
from engine.models.registry import open_model
from engine.protocols import NoDrafter
from tests.engine.heads.files import head_settings, save_head


@pytest.mark.parametrize(
    ("settings", "has_draft_model", "expected"),
    [
        ({}, True, "model"),
        ({}, False, "suffix"),
        ({"drafting": "ngram"}, True, "ngram"),
        ({"num_speculative_tokens": 0}, True, "none"),
        ({"drafting": "tree", "verification": "k_sequential"}, True, "tree"),
        ({"drafting": "self", "self_draft_layers": 2, "speculation": "off"}, False, "none"),
        ({"drafting": f"{__name__}:DIRECT", "verification": "block"}, True, f"{__name__}:DIRECT"),
        ({"drafting": "tests.examples.drafter:BigramDrafter"}, False, "tests.examples.drafter:BigramDrafter"),
    ],
)
def test_a_configuration_chooses_one_method(settings, has_draft_model, expected):
    assert choose_method(EngineConfig(**settings), has_draft_model=has_draft_model) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"drafting": "tree", "verification": "block"},
            "verification is 'block', but drafting is 'tree', which allows coupled or rejection or",
        ),
        ({"drafting": "self"}, "drafting is 'self', which needs self_draft_layers"),
        ({"self_draft_layers": 2}, "self_draft_layers is set, but drafting is 'auto', which does not draft with the"),
        (
            {"drafting": "tests.examples.drafter:Other"},
            "drafting is 'tests.examples.drafter:Other', which cannot be imp",
        ),
        ({"drafting": f"{__name__}:__name__"}, "it must be a class of drafters or a Method"),
        ({"drafting": f"{__name__}:DIRECT"}, "verification is 'coupled', but drafting is .*, which allows block"),
        ({"verification": "tests.examples.rule:accept"}, "it must be an engine.verification.rule.Rule"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_with_both_names(settings, message):
    with pytest.raises(ConfigError, match=message):
        choose_method(EngineConfig(**settings), has_draft_model=True)


@pytest.mark.parametrize(
    ("settings", "draft", "num_speculative_tokens"),
    [
        ({"drafting": "self", "self_draft_layers": 2}, None, 4),
        ({"draft_model": "/small"}, "/small", 4),
        ({"draft_model": "/small", "drafting": "ngram"}, None, 4),
        ({"draft_model": "/small", "drafting": "none"}, None, 0),
        ({"draft_model": "/small", "speculation": "off"}, None, 0),
    ],
)
def test_only_a_method_that_uses_the_draft_model_loads_it(settings, draft, num_speculative_tokens):
    """And where nothing is drafted, no room is reserved for drafts."""
    _, config, engine = settle(PairConfig(**settings))
    assert (config and config.path) == draft
    assert engine.num_speculative_tokens == num_speculative_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"drafting": "tree", "verification": "rejection"},
        {"drafting": "self", "self_draft_layers": 1},
        {"drafting": "head"},
    ],
)
def test_run_ahead_is_refused_where_drafts_need_to_know_the_verdict(settings):
    with pytest.raises(ConfigError, match=f"run_ahead is on, but drafting is '{settings['drafting']}'"):
        check_run_ahead(EngineConfig(**settings), "on")
    check_run_ahead(EngineConfig(**settings), "auto")
    for able in ({}, {"drafting": "none"}, {"drafting": "tree"}, {"verification": "block"}):
        check_run_ahead(EngineConfig(**able), "on")


@pytest.fixture
def model(tmp_path):
    """Makes the directory of a model of some type."""

    def make(name, model_type):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        return open_model(ModelConfig(str(tmp_path / name)))

    return make


@pytest.mark.parametrize(
    ("target", "draft", "method", "message"),
    [
        ("t5", "llama", "model", r"/t5 is an encoder-decoder, the draft .*/llama is decoder-only"),
        ("llama", "t5", "model", r"/llama is decoder-only, the draft .*/t5 is an encoder-decoder"),
        ("t5", "t5", "tree", "cannot verify trees"),
        ("t5", "t5", "self", "cannot draft for itself"),
        ("t5", "mt5", "model", None),
        ("llama", "llama", "tree", None),
    ],
)
def test_a_pair_is_of_one_kind_which_its_method_can_draft_for(target, draft, method, message, model):
    models = {name: model(name, name) for name in {target, draft}}
    if message is None:
        check_kinds(models[target], models[draft], METHODS[method])
        return
    with pytest.raises((ModelError, ModelMismatchError), match=message):
        check_kinds(models[target], models[draft], METHODS[method])


DIRECT = Method("draft", lambda config, draft: NoDrafter(), rules=("block",))


HEAD_ALONE = {"head_only": True, "execution": "torch", "vllm": {}}


@pytest.fixture
def head(tmp_path):
    return save_head(tmp_path / "head", head_settings("org/target@main"), {})


def test_a_head_is_loaded_with_its_target(head):
    settled = settle(PairConfig(draft_model=head))
    assert settled.target == replace(PairConfig(target_model="org/target@main").target, head=head)
    assert (settled.draft, settled.engine.drafting) == (None, "head")
    settled = settle(PairConfig(target_model="/other", draft_model=head, drafting="head_tree"))
    assert (settled.target.path, settled.target.head, settled.draft) == ("/other", head, None)
    settled = settle(PairConfig(draft_model=head, drafting="head_worker"))
    assert settled.draft == replace(settled.target, **HEAD_ALONE)
    assert settled.target.head == head
    settled = settle(PairConfig(draft_model=head, drafting="head_worker", execution="vllm", vllm={"seed": 1}))
    assert (settled.target.execution, settled.draft) == ("vllm", replace(settled.target, **HEAD_ALONE))
    for settings in ({"speculation": "off"}, {"num_speculative_tokens": 0}, {"drafting": "suffix"}):
        settled = settle(PairConfig(draft_model=head, **settings))
        assert (settled.target.path, settled.target.head, settled.draft) == ("org/target", None, None)
    hub = settle(PairConfig(target_model="/other", draft_model="org/head@v1", drafting="head"))
    assert hub.target.head == "org/head@v1"
    source = open_model(hub.target).head
    assert source is not None
    assert (source.path, source.config.revision, source.config.head) == ("org/head", "v1", None)
    assert [part.path for part in open_model(hub.target).parts] == [hub.target.path, "org/head"]


def test_the_bundled_head_is_of_the_bundled_target():
    pair = PairConfig(target_model="bundled", draft_model="bundled-head", drafting="head")
    assert settle(pair).target == replace(pair.target, head=str(BUNDLED_HEAD))
    assert pair.target.path == str(BUNDLED_TARGET)


def test_the_layers_of_a_checkpoint_are_a_head_at_its_own_path():
    settled = settle(PairConfig(target_model="org/big@main", drafting="mtp"))
    assert (settled.target.head, settled.draft) == ("org/big@main", None)
    source = open_model(settled.target)
    assert source.head is not None
    assert source.head.path == source.path


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"drafting": "tree"}, "a trained head, but drafting is 'tree', which needs a whole model"),
        ({"drafting": "mtp"}, "but drafting is 'mtp', which uses none"),
        ({"drafting": "self", "self_draft_layers": 1}, "but drafting is 'self', which uses none"),
        ({"drafting": "head_tree", "verification": "rejection"}, "verification is 'rejection', but .* allows coupled"),
        ({"verification": "k_sequential"}, "allows coupled or rejection or block"),
        ({"draft_quantization": "int8"}, "draft_quantization is int8, but the draft is a trained head"),
    ],
)
def test_what_does_not_fit_a_head_is_refused(head, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        settle(PairConfig(draft_model=head, **settings))


def test_a_draft_model_beside_a_target_that_drafts_for_itself_is_refused():
    with pytest.raises(ConfigError, match="draft_model is '/small', but drafting is 'self', which uses none"):
        settle(PairConfig(draft_model="/small", drafting="self", self_draft_layers=2))


def test_a_head_without_its_target_and_a_model_that_is_no_head_are_refused(tmp_path):
    nameless = save_head(tmp_path / "head", head_settings(), {})
    for path, problem in ((nameless, "do not name its target; set"), ("org/head", "are not here .`paceline pull`")):
        with pytest.raises(ConfigError, match=f"draft_model is '{path}', a trained head whose files {problem}"):
            settle(PairConfig(draft_model=path, drafting="head"))
    for draft_model in ("auto", "none", str(BUNDLED_DRAFT)):
        with pytest.raises(ConfigError, match=f"drafting is 'head', but draft_model is '{draft_model}', which is no"):
            settle(PairConfig(draft_model=draft_model, drafting="head"))


def test_a_head_and_its_target_are_checked(head, tmp_path, caplog):
    llama = tmp_path / "target"
    llama.mkdir()
    (llama / "config.json").write_text('{"model_type": "llama"}')
    check_kinds(open_model(ModelConfig(str(llama), head=head)), None, METHODS["head"])
    assert not caplog.records
    other = llama.rename(tmp_path / "other")
    check_kinds(open_model(ModelConfig(str(other), head=head)), open_model(ModelConfig(head)), METHODS["head_worker"])
    assert caplog.messages == [f"the head {head} was trained for org/target; the target is {other}"]
    with pytest.raises(ModelError, match="head is a trained head; drafting must be head, head_tree, head_worker"):
        check_kinds(open_model(ModelConfig(str(other))), open_model(ModelConfig(head)), METHODS["model"])
    block = tmp_path / "block"
    block.mkdir()
    (block / "config.json").write_text('{"speculators_model_type": "dflash"}')
    blocks = open_model(ModelConfig(str(other), head=str(block)))
    for name in ("head", "head_worker"):
        check_kinds(blocks, None, METHODS[name])
    with pytest.raises(ModelError, match=r"the head .*block drafts blocks; drafting must be head or head_worker"):
        check_kinds(blocks, None, METHODS["head_tree"])
    (other / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="other is an encoder-decoder, which no trained head reads"):
        check_kinds(open_model(ModelConfig(str(other), head=head)), None, METHODS["head"])


def test_several_drafts_are_settled_with_their_number_and_take_turns_where_a_worker_drafts():
    draft = str(BUNDLED_DRAFT)
    settled = settle(PairConfig(draft_model=f"{draft}, owner/name@main,other", draft_quantization="int8"))
    assert settled.draft is not None
    assert settled.draft.path == draft
    assert settled.draft.others == ("owner/name@main", "other")
    sources = open_model(settled.draft).drafts
    assert [(source.path, source.config.revision) for source in sources] == [
        (draft, None),
        ("owner/name", "main"),
        ("other", None),
    ]
    assert {source.config.quantization for source in sources} == {"int8"}
    assert settled.engine.num_drafts == 3
    assert settle(PairConfig(draft_model=f"{draft},other", drafting="suffix")).engine.num_drafts == 1


@pytest.mark.parametrize("draft_model", ["a,b,a", "a,,b", "none,a", "a, auto"])
def test_several_drafts_are_different_models_each_named(draft_model):
    with pytest.raises(ConfigError, match=f"draft_model is '{draft_model}'; several drafts must be different models"):
        settle(PairConfig(draft_model=draft_model))


@pytest.mark.parametrize("settings", [{}, {"drafting": "head"}, {"drafting": "model"}])
def test_a_head_drafts_alone(settings):
    draft_model = f"{BUNDLED_DRAFT},{BUNDLED_HEAD}"
    with pytest.raises(ConfigError, match="several drafts, but a trained head drafts alone"):
        settle(PairConfig(draft_model=draft_model, **settings))


def test_a_folder_whose_name_has_a_comma_is_one_draft(tmp_path):
    (folder := tmp_path / "a,b").mkdir()
    assert settle(PairConfig(draft_model=str(folder))).engine.num_drafts == 1
