"""A server of two Routers and two Ingresses, and for long tests its neighbour on this machine.

Both have a small model, which one draft worker of a pool drafts for at the server, unless a request is `PLAIN`. The
queues are short, and so is the time in which streams may end.
test_stopping.py ends the server.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server, serving
from tests.models import save_model

NUM_ROUTERS = 2
MAX_NUM_SEQS = 2
MAX_QUEUED = 2
DRAIN_TIMEOUT_S = 4
PLAIN: dict[str, Any] = {"speculative": {"enabled": False}}


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicated")


@pytest.fixture(scope="package")
def common(folder: Path) -> tuple[str, ...]:
    model = save_model(folder / "model", seed=1, layers=2, hidden=32, max_position_embeddings=32_768)
    return f"target_model={model}", f"draft_model={model}", "dtype=float32", "num_blocks=20000"


@pytest.fixture(scope="package")
def server(folder: Path, common: tuple[str, ...]) -> Iterator[Server]:
    settings = (
        "served_model_name=tiny",
        "log_format=json",
        "stream_interval_s=0.1",
        "num_ingress_replicas=2",
        f"max_num_seqs={MAX_NUM_SEQS}",
        f"max_queued_requests={MAX_QUEUED}",
        f"drain_timeout_s={DRAIN_TIMEOUT_S}",
        f'autoscaling={{"min_replicas": {NUM_ROUTERS}}}',
        'draft_pool={"replicas": 1}',
        "speculation=fixed",
        "hang_timeout_s=6",
        "page=demo",
    )
    with serving(folder / "log", *common, *settings) as server:
        yield server


@pytest.fixture(scope="package")
def neighbour(folder: Path, common: tuple[str, ...]) -> Iterator[Server]:
    with serving(folder / "neighbour", "served_model_name=neighbour", "speculation=off", *common) as neighbour:
        yield neighbour


@pytest.fixture(scope="package")
def url(server: Server) -> str:
    return server.url
