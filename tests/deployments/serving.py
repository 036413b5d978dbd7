"""Applications on a real port of this machine, in an event loop of another thread: real HTTP without Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp

from deployments.config import AppConfig
from engine.config import ModelConfig
from engine.models.registry import open_model
from engine.protocols import Drafter
from engine.sampling.grammar import Grammars
from tests.deployments.conftest import make_app
from tests.deployments.fakes import EOS_TOKEN_IDS, VOCAB_SIZE, LocalRouters, Rig
from tests.waiting import wait_until


@contextmanager
def listening(portal: BlockingPortal, app: ASGIApp) -> Iterator[str]:
    """Serve in the portal's event loop until the block ends; yields the address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    task = portal.start_task_soon(server.serve)
    wait_until(lambda: server.started or task.done(), 30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        task.result(30)


@contextmanager
def serving(
    config: AppConfig, model_dir: Path, *, keys: tuple[str, ...] = (), drafter: Drafter | None = None
) -> Iterator[tuple[str, Rig]]:
    """Serve our application until the block ends; yields the address and the rig behind it."""
    grammars = Grammars(open_model(ModelConfig(str(model_dir))), vocab_size=VOCAB_SIZE, eos_token_ids=EOS_TOKEN_IDS)
    with start_blocking_portal() as portal:
        rig = portal.call(partial(Rig, grammars=grammars, drafter=drafter))
        app = portal.call(partial(make_app, config, LocalRouters(rig), keys=keys))
        with listening(portal, app) as url:
            yield url, rig
        portal.call(rig.loop.stop)
