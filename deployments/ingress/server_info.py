"""The response bodies about the server, /v1/models and /version, and the fingerprint of what it computes."""

import functools
import hashlib
import json
from importlib import metadata
from typing import Literal

from deployments.config import AppConfig
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


def fingerprint(config: AppConfig) -> str:
    """Return a name of what a text depends on beside its request: another name may mean other texts for a seed.

    It stands for the version, the target, its number format, device and ranks, and the verification rule. By the
    coupled rule a text depends on nothing else; by others also on drafts and rounds, which are not in the name.
    """
    pair = config.pair
    basis = [
        installed_version(),
        *(pair.target_model, pair.target_revision, pair.dtype, pair.device, pair.verification),
        config.tensor_parallel_size,
    ]
    return f"fp_{hashlib.sha256(json.dumps(basis, default=str).encode()).hexdigest()[:12]}"


@functools.cache
def installed_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that was not installed
