"""What is served."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

import deployments
from deployments.config import AppConfig
from deployments.ingress.server_info import announcement, fingerprint
from deployments.sections import ingress_config
from engine.config import ModelInfo
from tests.deployments.conftest import make_sdk
from tests.deployments.fakes import LocalRouters


async def test_what_is_served(client: httpx.AsyncClient, config: AppConfig) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", Path(config.pair.target.path).name, 512)
    answer = (await client.get("/version")).json()
    assert answer["version"] == deployments.__version__
    assert (answer["device"], answer["num_parameters"]) == ("auto", 1000)


async def test_a_model_is_found_by_its_name(client: httpx.AsyncClient) -> None:
    sdk = make_sdk(client)
    assert await sdk.models.retrieve("tiny") == (await sdk.models.list()).data[0]
    for name in ("other", "org/tiny", "tiny/"):
        with pytest.raises(openai.NotFoundError) as error:
            await sdk.models.retrieve(name)
        assert (error.value.param, error.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({}, ", no draft;"),
        ({"draft_model": "/models/b"}, ", draft /models/b still loading;"),
        ({"head": "/models/c"}, ", head /models/c;"),
    ],
)
async def test_the_log_says_what_is_served_where_and_how_to_try_it(
    models: dict[str, str], told: str, config: AppConfig, routers: LocalRouters
) -> None:
    description = replace(await routers.describe(), **models)
    text = announcement(ingress_config(config), description, "http://127.0.0.1:8000")
    assert text.startswith(f"serving target {description.target.name} (")
    assert told in text
    assert "curl -s http://127.0.0.1:8000/v1/completions" in text
    assert f'"model": "{config.model_name}"' in text


def test_a_fingerprint_changes_with_what_texts_depend_on_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    def name(tokenizer: PreTrainedTokenizerFast = tokenizer, device: str = "cpu", **settings: Any) -> str:
        info = ModelInfo(
            "a", 9, 9, [0], 1, settings.pop("dtype", "float32"), device, digest=settings.pop("digest", "a")
        )
        return fingerprint(ingress_config(AppConfig.model_validate(settings)), info, tokenizer)

    other = copy.deepcopy(tokenizer)
    other.chat_template = "other"
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["new"])
    names = [
        name(),
        name(digest="b"),
        name(dtype="bfloat16"),
        name(device="cuda:0"),
        name(target_quantization="int8"),
        name(verification="rejection"),
        name(tensor_parallel_size=2),
        name(other),
        name(larger),
    ]
    assert len(set(names)) == len(names)
    assert name(draft_model="none", stream_interval_s=1, target_model="other@a") == names[0]
    assert name(device="cuda:1") == names[3]
