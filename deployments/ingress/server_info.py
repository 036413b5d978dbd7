"""What the server says of itself: the bodies of /v1/models and /version, its fingerprint, its announcement."""

import functools
import hashlib
import json
from importlib import metadata
from typing import Literal

from deployments.config import AppConfig
from deployments.openai.fields import ResponseModel
from deployments.router.generation import Description


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

    It stands for the version, the target, its quantisation, number format, device and ranks, and the verification rule.
    By the coupled rule a text depends on nothing else; by others also on drafts and rounds, which are not in the name.
    """
    pair = config.pair
    basis = [
        installed_version(),
        *(
            pair.target_model,
            pair.target_revision,
            pair.dtype,
            pair.device,
            pair.verification,
            pair.target_quantization,
        ),
        config.tensor_parallel_size,
    ]
    return f"fp_{hashlib.sha256(json.dumps(basis, default=str).encode()).hexdigest()[:12]}"


def announcement(config: AppConfig, description: Description, base_url: str) -> str:
    """Return what the log says when the service is ready: what is served, where, and a command that tries it."""
    target, draft = description.target, description.draft
    pair = f"target {target.name} ({target.num_parameters / 1e6:.1f} M, {target.dtype}, {target.device})"
    if config.tensor_parallel_size > 1:
        pair += f" over {config.tensor_parallel_size} ranks"
    if draft is None:
        pair += f", draft {description.draft_model} still loading" if description.draft_model else ", no draft"
    else:
        pair += f", draft {draft.name} ({draft.num_parameters / 1e6:.1f} M, {draft.dtype}, {draft.device})"
    length = description.limits.num_speculative_tokens
    curl = (
        f"curl -s {base_url}/v1/completions -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{config.model_name}", "prompt": "This PEP proposes", "max_tokens": 48}}'"""
    )
    return f"serving {pair}; draft length {length}; {base_url}\n  {curl}"


@functools.cache
def installed_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that was not installed
