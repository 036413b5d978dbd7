"""A server says what it is before load is sent to it."""

import pytest

from tests.load.client import Client
from tests.load.fake_server import FakeServer
from tests.load.records import Acceptance
from tests.load.server import Counters, LoadError, Server, count_prompt_tokens, prompt_fields, read_counters, survey


@pytest.fixture
async def client(server: FakeServer):
    client = Client(server.url, "/v1/completions")
    yield client
    await client.close()


async def test_a_server_with_our_extensions_is_known(server: FakeServer, client: Client) -> None:
    found = await survey(client, "completions", None)
    assert found == Server("tiny", 2048, True, {"version": "0.1.0", "device": "cpu"}, compiles_for_s=40)


async def test_a_server_that_refuses_them_is_asked_without(server: FakeServer, client: Client) -> None:
    server.has_extensions = False
    assert not (await survey(client, "chat", "tiny")).has_extensions


async def test_a_server_that_refuses_everything_or_has_another_model_is_an_error(
    server: FakeServer, client: Client
) -> None:
    with pytest.raises(LoadError, match="tiny, and not big"):
        await survey(client, "completions", "big")
    server.failures = {1: 400, 2: 401}
    with pytest.raises(LoadError, match="401"):
        await survey(client, "completions", None)


async def test_the_server_counts_tokens(client: Client) -> None:
    found = await survey(client, "completions", None)
    assert await count_prompt_tokens(client, found, "completions", "x" * 400) == 100


async def test_counters_are_read_and_subtracted(server: FakeServer, client: Client) -> None:
    server.num_drafts, server.num_rounds = 3, 5
    before = await read_counters(client)
    server.num_drafts, server.num_rounds = 5, 9
    after = await read_counters(client)
    assert before is not None
    assert after is not None
    assert after.since(before) == Counters(Acceptance(2, 8, 4), {"goodput": 4.0})
    assert after.since(after).rounds == {}
    server.metrics = lambda: "other_total 1\n"  # type: ignore[method-assign]
    assert await read_counters(client) is None


def test_messages_go_to_the_chat_api_only() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert prompt_fields("chat", "x") == prompt_fields("chat", messages) == {"messages": messages}
    assert prompt_fields("completions", "x") == {"prompt": "x"}
    with pytest.raises(LoadError, match="--endpoint chat"):
        prompt_fields("completions", messages)
