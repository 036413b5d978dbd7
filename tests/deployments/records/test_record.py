"""Records: the answers of all four APIs become records that read back, and only with their clients' consent."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from deployments.records.record import REQUESTS, Record
from deployments.records.record_lines import read_records
from engine.errors import TargetError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.waiting import wait_until

USER = [{"role": "user", "content": "hi"}]
PARTS = [{"type": "text", "text": "hi"}]
HOT = {"temperature": 3.0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "structured_outputs": {"json": {"type": "integer"}}, **HOT, "suffix": ""},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PARTS}],
        **HOT,
        "n": 2,
    },
    "/v1/responses": {
        "input": USER,
        "instructions": "be brief",
        "max_output_tokens": 9,
        **HOT,
    },
    "/v1/messages": {"messages": USER, "system": "be brief", "max_tokens": 9, "stop_sequences": ["K"], **HOT},
}


@pytest.fixture
async def client(config: AppConfig, routers: LocalRouters, tmp_path: Path):
    kept = config.model_copy(update={"record": tmp_path})
    async with make_client(await make_app(kept, routers)) as client:
        yield client


async def records_in(folder: Path, count: int) -> list[Record]:
    await asyncio.to_thread(wait_until, lambda: len([*folder.glob("*.jsonl")]) > 0 and _num_lines(folder) >= count, 10)
    found = [record for _, record in read_records(folder / "local.jsonl")]
    assert all(isinstance(record, Record) for record in found), found
    return found


def _num_lines(folder: Path) -> int:
    return (folder / "local.jsonl").read_text().count("\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_all_apis_are_kept_and_pass(client: httpx.AsyncClient, tmp_path: Path, stream: bool) -> None:
    for path, body in BODIES.items():
        response = await client.post(path, json=body | {"stream": stream})
        assert response.status_code == 200, response.text
    records = await records_in(tmp_path, len(BODIES))
    assert {record.path for record in records} == BODIES.keys() == REQUESTS.keys()
    for record in records:
        assert record.request() == REQUESTS[record.path].model_validate(BODIES[record.path])
        assert record.seed is not None, "of a request without a seed, the server's"
        assert record.seconds is not None
        response = await client.post("/v1/audit", json=record.model_dump(mode="json"))
        for choice in response.json()["choices"]:
            assert choice["num_tokens"] > 1
            assert (choice["differences"], choice["problems"]) == ([], [])
        assert response.json()["system_fingerprint"] == record.system_fingerprint


async def test_salted_answers_are_kept_only_with_consent_and_failed_answers_never(
    client: httpx.AsyncClient, routers: LocalRouters, tmp_path: Path
) -> None:
    routers.error = TargetError("lost")
    asked = {"prompt": "abc", "max_tokens": 40, "stream": True}
    assert "error" in (await client.post("/v1/completions", json=asked)).text
    routers.error = None
    for extra in ({"cache_salt": "s"}, {"cache_salt": "t", "speculative": {"record": True}}, {}):
        await client.post("/v1/completions", json={**asked, **extra})
    salts = [record.body.get("cache_salt") for record in await records_in(tmp_path, 2)]
    assert salts == ["t", None]


async def test_a_continued_stream_has_the_whole_record(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "abc", **HOT, "max_tokens": 12, "stream": True, "speculative": {"record": True}}
    lines = (await client.post("/v1/completions", json=asked)).text.split("\n\n")
    event_id = lines[3].rpartition("id: ")[2]
    rest = (await client.post("/v1/completions", json=asked, headers={"Last-Event-ID": event_id})).text
    events = (lines[-3], rest.split("\n\n")[-3])
    records = [json.loads(event.removeprefix("data: ").partition("\nid: ")[0])["record"] for event in events]
    for record in records:
        del record["seconds"]
    assert records[0] == records[1]
    assert len(records[0]["choices"][0]["token_ids"]) == 12


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_other_apis_refuse_to_send_a_record(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json=BODIES[path] | {"speculative": {"record": True}})
    assert response.status_code == 400
    assert "speculative.record is not available here" in response.json()["error"]["message"]
