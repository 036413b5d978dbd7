"""The response bodies about the server: /v1/models and /version."""

from typing import Literal

from deployments.openai.fields import ResponseModel


class ModelCard(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(ResponseModel):
    """The server's version, and its `device` setting, which tells if it only imitates the speed of a GPU."""

    version: str
    device: str
