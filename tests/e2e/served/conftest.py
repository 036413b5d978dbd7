"""One server for the tests of this folder: the bundled pair, as `make serve` starts it under `timeout`.

Its log is one that can be looked into. The last test ends the server.
"""

import shlex
from collections.abc import Iterator

import pytest

from engine.llm import LLM
from tests.e2e.servers import Server, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")

    def under_make(command: list[str]) -> list[str]:
        (folder / "Makefile").write_text(f"serve:\n\t@{shlex.join(command)}\n")
        return ["timeout", "3600", "make", "-f", str(folder / "Makefile")]

    settings = ("served_model_name=tiny", "log_format=json")
    with serving(folder / "log", *settings, wrap=under_make) as server:
        yield server


@pytest.fixture(scope="package")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="package")
def target() -> LLM:
    return LLM(drafting="none", compile="off")
