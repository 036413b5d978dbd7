"""The routes: malformed requests, unknown paths, metrics, and a schema that describes what is sent."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deployments.config import AppConfig
from engine.errors import TargetError
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters
from tests.deployments.serving import serving

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
    "unsupported_method",
]
"""Not positive_data_acceptance: what fits the schema may still exceed a limit or the model's context."""


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}, 200, ""),
        ({"content-type": "application/vnd.api+json"}, 200, ""),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "'Content-Type: application/json'"),
        ({"content-type": "text/plain; a=application/json"}, 415, "content-type is text/plain; a=application/json;"),
        ({}, 415, "content-type is missing; send JSON, with 'Content-Type: application/json'"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "content-encoding is gzip;"),
    ],
)
async def test_a_body_is_json_as_it_is(
    client: httpx.AsyncClient, routers: LocalRouters, headers: dict[str, str], status: int, said: str
) -> None:
    response = await client.post("/v1/completions", content=b'{"prompt": "abc"}', headers=headers)
    assert response.status_code == status
    assert said in response.text if status == 200 else said in response.json()["error"]["message"]
    assert routers.refused == ({"unsupported_media_type": 1} if status == 415 else {})


@pytest.mark.parametrize(
    ("path", "sent", "key", "reason"),
    [
        ("/v1/completions", {"prompt": "a"}, "right", None),
        ("/v1/completions", {"prompt": "a"}, "wrong", "invalid_api_key"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "right", "invalid_request_error"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 999}, "right", "context_length_exceeded"),
        ("/v1/messages", {"model": "b", "messages": [], "max_tokens": 1}, "right", "invalid_request_error"),
        (
            "/v1/chat/completions",
            {"model": "b", "messages": [{"role": "user", "content": ""}]},
            "right",
            "model_not_found",
        ),
        ("/v1/responses", {"input": "x" * 2**20}, "right", "body_too_large"),
        ("/v1/models", {}, "wrong", None),
        ("/tokenize", {"prompt": 5}, "right", None),
    ],
)
async def test_refusals_at_the_door_are_counted_by_reason(
    config: AppConfig, routers: LocalRouters, path: str, sent: dict[str, object], key: str, reason: str | None
) -> None:
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        response = await client.post(path, json=sent, headers={"x-api-key": key})
        assert routers.refused == ({} if reason is None else {reason: 1}), response.text
        routers.free = 0.0
        for _ in range(3):
            await client.post("/v1/messages", json={"prompt": "a"}, headers={"x-api-key": "right"})
        assert routers.refused["queue_full"] == 3


async def test_what_fails_at_a_router_is_no_refusal(client: httpx.AsyncClient, routers: LocalRouters) -> None:
    routers.error = TargetError("gone")
    assert (await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 99})).status_code == 503
    assert not routers.refused


@pytest.mark.parametrize(
    ("url", "replicas"),
    [
        ("http://paceline/metrics", {"ingress", "router"}),
        ("http://10.0.0.7:8000/metrics?scope=local", {"router"}),
        ("http://10.0.0.8/metrics?scope=local", {"ingress"}),
        ("http://[fd00::1]:8000/metrics?scope=local", set()),
        ("http://paceline/metrics?scope=local", None),
        ("http://10.0.0.7:8000/metrics?scope=pod", None),
    ],
)
async def test_metrics_are_of_all_replicas_or_of_those_on_one_node(
    client: httpx.AsyncClient, url: str, replicas: set[str] | None
) -> None:
    response = await client.get(url)
    if replicas is None:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "scope")
    else:
        assert set(re.findall(r'replica="(\w+)"', response.text)) == replicas


@pytest.mark.parametrize("origins", [[], ["https://chat.example.com"], ["*"]], ids=["none", "one", "all"])
async def test_a_browser_may_call_from_pages_that_the_operator_names(
    config: AppConfig, routers: LocalRouters, origins: list[str]
) -> None:
    config = config.model_copy(update={"cors_allow_origins": tuple(origins)})
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        for origin in ("https://chat.example.com", "https://other.example.com"):
            is_allowed = origin in origins or "*" in origins
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asked["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
            leave = await client.options("/v1/completions", headers=asked)  # browsers send no key with it
            assert leave.is_success is is_allowed
            assert ("access-control-allow-origin" in leave.headers) is is_allowed
            assert not is_allowed or "x-stainless-os" in leave.headers["access-control-allow-headers"]
            for key, status in (("right", 200), ("wrong", 401)):
                headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
                response = await client.get("/v1/models", headers=headers)
                assert response.status_code == status
                assert ("access-control-allow-origin" in response.headers) is is_allowed


async def test_the_description_tells_the_truth(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    operation = schema["paths"]["/v1/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert all("422" not in op["responses"] for path in schema["paths"].values() for op in path.values())


LARGE = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
SMALL = ("--phases", "coverage", *(part for path in LARGE for part in ("--exclude-path", path)))
"""Each field of an operation adds some twenty cases, and those four have most fields."""
WHOLE = ("--phases", "coverage,fuzzing", "--max-examples", "6")


@pytest.mark.parametrize(
    "scope", [pytest.param(SMALL, id="small operations"), pytest.param(WHOLE, id="all", marks=pytest.mark.long)]
)
def test_the_schema_holds_under_a_fuzzer(config: AppConfig, model_dir: Path, scope: tuple[str, ...]) -> None:
    with serving(config, model_dir) as (url, rig):
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *scope),
            *("--checks", ",".join(CHECKS), "--mode", "all", "--seed", "1", "--max-failures", "20"),
            *("--request-timeout", "60", "--generation-database", "none", "--no-color"),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=model_dir, check=False)
        assert result.returncode == 0, result.stdout[-12000:] + result.stderr[-2000:]
        assert rig.engine.num_requests == 0
        assert rig.engine.scheduler.pool.num_free == rig.engine.scheduler.pool.num_blocks
