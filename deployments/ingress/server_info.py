"""Facts about the server: the bodies of /v1/models and /version, its fingerprint, the log line when it is ready."""

import functools
import hashlib
import json
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from deployments.openai.types import ResponseModel
from deployments.sections import IngressConfig
from deployments.wire import Description
from engine.config import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
    num_parameters: int | None
    """The target's; null while the models are being loaded."""
    system_fingerprint: str | None
    """The same as in answers; null while the models are being loaded."""


def version_of(device: str, target: ModelInfo | None, fingerprint: str) -> Version:
    """Return the body of /version; `target` is None and `fingerprint` empty while the models are being loaded."""
    return Version(
        version=installed_version(),
        device=device,
        num_parameters=None if target is None else target.num_parameters,
        system_fingerprint=fingerprint or None,
    )


def fingerprint(config: IngressConfig, target: ModelInfo, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a digest of all, but for the request, that determines a text under the coupled rule, near-ties aside."""
    basis = [
        installed_version(),
        hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        tokenizer.chat_template,
        *(target.digest, target.dtype, target.device.partition(":")[0], config.target.quantization),
        config.verification,
        config.tensor_parallel_size,
    ]
    return f"fp_{hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:12]}"


def announcement(config: IngressConfig, description: Description, base_url: str) -> str:
    """Return the log line of a service that is ready: address and models, and a command to try it."""
    target, draft = description.target, description.draft
    pair = f"target {target.name} ({target.num_parameters / 1e6:.1f} M, {target.dtype}, {target.device})"
    if config.tensor_parallel_size > 1:
        pair += f" over {config.tensor_parallel_size} ranks"
    if draft is None:
        beside = f"head {description.head}" if description.head else "no draft"
        pair += f", draft {description.draft_model} still loading" if description.draft_model else f", {beside}"
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
