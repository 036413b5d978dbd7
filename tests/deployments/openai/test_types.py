import pytest
from pydantic import ValidationError

from deployments.openai.types import JsonObject, RequestModel, ResponseModel, TokenId, to_json


class Body(RequestModel):
    text: str | None = None
    tokens: list[TokenId] | None = None
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
        {"tokens": ["1"]},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"schema_": {"a": [float("inf")]}},
        {"schema_": {"a": float("nan")}},
        {"tokens": [1.5]},
        {"tokens": [True]},
    ],
)
def test_unknown_fields_and_other_types_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Body.model_validate(body)


def test_a_response_leaves_out_what_was_not_set() -> None:
    assert to_json(Answer(always=None)) == '{"always":null}'
    assert to_json(Answer(always=1, sometimes=None)) == '{"always":1,"sometimes":null}'
