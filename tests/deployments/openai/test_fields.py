import pytest
from pydantic import ValidationError

from deployments.openai.fields import JsonObject, OnlyFalse, RequestModel, ResponseModel, Text, TokenId


class Body(RequestModel):
    text: Text | None = None
    tokens: list[TokenId] | None = None
    background: OnlyFalse | None = None
    schema_: JsonObject | None = None


class Answer(ResponseModel):
    always: int | None
    sometimes: int | None = None


def test_null_is_accepted_also_for_an_unknown_field() -> None:
    assert Body.model_validate({"text": None, "suffix": None}) == Body()


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": 1},
        {"text": 1},
        {"text": "\ud800"},
        {"tokens": ["1"]},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"background": 0},
        {"background": True},
        {"schema_": {"a": [float("inf")]}},
        {"schema_": {"a": float("nan")}},
        {"schema_": {"a": ["\ud800"]}},
        {"schema_": {"\udc00": 1}},
    ],
)
def test_unknown_fields_and_other_types_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Body.model_validate(body)


def test_the_first_wrong_item_ends_the_validation_of_a_list() -> None:
    with pytest.raises(ValidationError) as error:
        Body.model_validate({"tokens": [1, *[-1] * 1000]})
    assert [detail["loc"][:2] for detail in error.value.errors()] == [("tokens", 1)] * error.value.error_count()
    assert error.value.error_count() < 5


def test_a_response_leaves_out_what_was_not_set() -> None:
    assert Answer(always=None).to_json() == '{"always":null}'
    assert Answer(always=1, sometimes=None).to_json() == '{"always":1,"sometimes":null}'
