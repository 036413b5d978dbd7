"""The application in this process, over fake Routers, and its clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from starlette.types import ASGIApp
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deployments.config import AppConfig
from deployments.guard.middleware import SafeHeaders
from deployments.ingress.ingress import Ingress
from deployments.sections import ingress_config
from engine.config import ModelConfig
from engine.models.registry import open_model
from engine.sampling.grammar import Grammars
from tests.deployments.fakes import EOS_TOKEN_IDS, VOCAB_SIZE, LocalRouters, Rig
from tests.deployments.templates import TEMPLATE, save_tokenizer, tokenizer_of
from tests.deployments.thinking import save_thinking


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of(TEMPLATE)


@pytest.fixture(scope="session")
def model_dir(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def grammars(model_dir: Path) -> Grammars:
    return Grammars(open_model(ModelConfig(str(model_dir))), vocab_size=VOCAB_SIZE, eos_token_ids=EOS_TOKEN_IDS)


@pytest.fixture
async def rig(grammars: Grammars) -> AsyncIterator[Rig]:
    rig = Rig(grammars=grammars)
    yield rig
    await rig.loop.stop()


@pytest.fixture
def routers(rig: Rig) -> LocalRouters:
    return LocalRouters(rig)


async def make_app(config: AppConfig, routers: LocalRouters, *, keys: tuple[str, ...] = ()) -> ASGIApp:
    ingress = object.__new__(Ingress)
    await ingress.__init__(ingress_config(config), routers, keys=keys)  # as Serve does it
    return SafeHeaders(ingress.__serve_build_asgi_app__())  # before which Serve puts it, too


def make_client(app: ASGIApp) -> httpx.AsyncClient:
    # As over a real connection: an error in the application is a response, not an exception in the client.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://paceline")


def make_sdk(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://paceline/v1", api_key="none", http_client=client, max_retries=0)


@asynccontextmanager
async def client_of(template: str, routers: LocalRouters, path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model with this chat template, whose files go into `path`."""
    save_tokenizer(template, path)
    config = AppConfig(target_model=str(path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, routers)) as client:
        yield client


@pytest.fixture
def config(model_dir: Path) -> AppConfig:
    return AppConfig(target_model=str(model_dir), served_model_name="tiny", stream_interval_s=0)


@pytest.fixture
async def client(config: AppConfig, routers: LocalRouters) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(await make_app(config, routers)) as client:
        yield client


@pytest.fixture
def sdk(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return make_sdk(client)


@pytest.fixture
async def thinking(rig: Rig, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    save_thinking(tmp_path)
    rig.engine._tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # which knows the token that ends thoughts
    config = AppConfig(target_model=str(tmp_path), served_model_name="tiny", stream_interval_s=0)
    async with make_client(await make_app(config, LocalRouters(rig))) as client:
        yield client
