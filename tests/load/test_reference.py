"""Every text is compared, and a wrong one is named."""

import pytest

from tests.load.client import Client
from tests.load.fake_server import FakeServer, fake_server
from tests.load.options import parse
from tests.load.plan import Plan, make_plan
from tests.load.records import Record
from tests.load.reference import differences, reference_texts
from tests.load.server import LoadError, survey


def test_a_text_that_differs_is_named_from_where_it_differs() -> None:
    records = [Record(i, "d", 0, 0, arm="on", text=text) for i, text in enumerate(["abc", "abd", "ab"])]
    records.append(Record(3, "d", 0, 0, outcome="503", text="a"))
    found = differences(records, {0: "abc", 1: "abc", 2: "abc"})
    assert [(text.index, text.position, text.expected, text.actual) for text in found] == [
        (1, 2, "c", "d"),
        (2, 2, "c", ""),
    ]
    assert "request 1 (arm on, turn 0)" in str(found[0])


async def plan_of(server: FakeServer, reference: str, *words: str) -> Plan:
    options = parse(["--url", server.url, "--reference", reference, "--max-tokens", "8", *words])
    client = Client(server.url, "/v1/completions")
    try:
        return await make_plan(options, client, await survey(client, options.endpoint, None))
    finally:
        await client.close()


async def test_a_server_is_asked_without_drafts_and_once_for_each_text(server: FakeServer) -> None:
    plan = await plan_of(server, server.url)
    count = 2 * len(plan.prompts)
    server.bodies.clear()
    texts = await reference_texts(plan, [Record(i, "d", 0, 0) for i in range(count)])
    asked = [body for body in server.bodies if body.get("cache_salt") != "survey"]
    assert len(asked) == len(plan.prompts)  # at temperature 0, the same prompt has the same text
    assert all(body["speculative"] == {"enabled": False} for body in asked)
    assert texts.keys() == set(range(count))
    assert texts[0] == texts[len(plan.prompts)] != texts[1]


async def test_a_reference_that_fails_is_an_error(server: FakeServer) -> None:
    with fake_server() as other:
        plan = await plan_of(server, other.url)
        other.failures = {2: 500}
        with pytest.raises(LoadError, match="does not answer: 500"):
            await reference_texts(plan, [Record(0, "d", 0, 0)])


async def test_the_engine_writes_the_targets_text(server: FakeServer) -> None:
    from engine import LLM, SamplingParams

    plan = await plan_of(server, "engine")
    record = Record(0, "d", 0, 0, prompt_token_ids=[7, 8, 9])
    texts = await reference_texts(plan, [record])
    llm = LLM(drafting="none", compile="off")
    (expected,) = llm.generate([[7, 8, 9]], SamplingParams(temperature=0.0, max_tokens=8), show_progress=False)
    assert texts == {0: expected.outputs[0].text}
