"""How users write the sub-layers that a self-draft skips."""

import json

import pytest

from engine.config import EngineConfig, make_pair
from engine.drafting.skip_list import check_names, layer_of, read_skip_list
from engine.errors import ConfigError


@pytest.mark.parametrize(
    "value", [["attention.3", "mlp.10"], "attention.3 mlp.10", "attention.3,mlp.10", " attention.3, mlp.10 "]
)
def test_names_are_a_list_or_words(value):
    assert read_skip_list(value) == ("attention.3", "mlp.10")
    assert make_pair(self_draft_skip=value).self_draft_skip == ("attention.3", "mlp.10")


@pytest.mark.parametrize("content", [["mlp.1"], {"self_draft_skip": ["mlp.1"], "layers": 12}])
def test_a_file_holds_a_list_or_an_object_with_one(content, tmp_path):
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps(content))
    assert read_skip_list(f"@{path}") == ("mlp.1",)


@pytest.mark.parametrize("content", [None, "no JSON", '"mlp.1"', '{"skip": ["mlp.1"]}'])
def test_a_file_that_holds_something_else_is_refused_by_its_path(content, tmp_path):
    path = tmp_path / "chosen.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"self_draft_skip: .*{path}"):
        read_skip_list(f"@{path}")


@pytest.mark.parametrize("value", [3, {"mlp.1": True}, [1, 2]])
def test_other_types_are_refused_by_the_configuration(value):
    with pytest.raises(ConfigError, match=r"self_draft_skip is .*; it must be"):
        make_pair(self_draft_skip=value)
    assert EngineConfig(self_draft_skip=None).self_draft_skip is None


@pytest.mark.parametrize("name", ["attn.3", "mlp", "mlp.-1", "mlp.03", "mlp.1.2", "attention.x", ""])
def test_what_is_no_name_of_a_sub_layer_is_refused(name):
    with pytest.raises(ConfigError, match=f"self_draft_skip has {name!r}; a sub-layer"):
        check_names(("mlp.1", name))


def test_names_have_the_index_of_their_layer():
    check_names(("mlp.0", "attention.12"))
    assert [layer_of("mlp.0"), layer_of("attention.12")] == [0, 12]
