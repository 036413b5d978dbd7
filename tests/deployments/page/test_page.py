"""The page's files: which are served, with which headers, how large they are, and that they need nothing else."""

import re

import pytest

from deployments.config import AppConfig
from deployments.guard.middleware import OPEN_ROUTES
from deployments.observe.metrics import exposition
from deployments.page.page import FILES, STATIC
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters

MAX_BYTES = 60_000
MAX_LINES = 715
SOURCES = {path.name: path.read_text() for path in sorted(STATIC.iterdir())}


@pytest.mark.parametrize("name", FILES)
async def test_a_file_needs_no_key_is_sent_once_and_runs_nothing_from_elsewhere(
    config: AppConfig, routers: LocalRouters, name: str
) -> None:
    async with make_client(await make_app(config, routers, keys=("right",))) as client:
        response = await client.get(f"/{name}")
        again = await client.get(f"/{name}", headers={"If-None-Match": response.headers["etag"]})
    assert f"/{name}" in OPEN_ROUTES
    assert response.headers["content-type"] == f"{FILES[name]}; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy.pop("img-src") == "'self' data:"
    nothing = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert policy == dict.fromkeys(nothing, "'none'") | dict.fromkeys(
        ("script-src", "style-src", "connect-src"), "'self'"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(("page", "status"), [("off", 404), ("on", 200), ("demo", 200)])
async def test_the_page_can_be_switched_off_and_says_if_it_is_a_demo(
    config: AppConfig, routers: LocalRouters, page: str, status: int
) -> None:
    async with make_client(await make_app(config.model_copy(update={"page": page}), routers)) as client:
        responses = [await client.get(f"/{name}") for name in FILES]
        assert (await client.post("/")).status_code == (405 if status == 200 else 404)
    assert [response.status_code for response in responses] == [status] * len(FILES)
    assert (f'<body data-page="{page}">' in responses[0].text) is (status == 200)


def test_the_page_is_small_and_names_nothing_of_another_origin() -> None:
    assert sum(len(source.encode()) for source in SOURCES.values()) <= MAX_BYTES
    assert sum(len(source.splitlines()) for source in SOURCES.values()) <= MAX_LINES
    assert [line for source in SOURCES.values() for line in source.splitlines() if len(line) > 120] == []
    assert SOURCES.keys() == {name or "page.html" for name in FILES}
    for source in SOURCES.values():
        assert set(re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"^\s*// .*", "", source, flags=re.M))) <= {
            "http://www.w3.org"  # the namespace of SVG
        }


async def test_the_figures_that_the_page_shows_are_in_the_metrics(routers: LocalRouters) -> None:
    wanted = set(re.findall(r'"((?:vllm|paceline):\w+)"', SOURCES["page.js"]))
    text = exposition(await routers.collect(), "tiny").decode()
    assert len(wanted) == 10
    learning = {"paceline:draft_learning_swaps_total"}  # of a draft that learns
    assert wanted - learning <= set(re.findall(r"^([\w:]+)\{", text, re.M))
