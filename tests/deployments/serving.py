"""The application on a real port of this machine, its engine in the same process: real HTTP without Ray."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from deployments.config import AppConfig
from engine.config import ModelConfig
from engine.models.registry import open_model
from engine.protocols import Drafter
from engine.sampling.grammar import Grammars
from tests.deployments.conftest import make_app
from tests.deployments.fakes import EOS_TOKEN_IDS, VOCAB_SIZE, LocalRouters, Rig


@contextmanager
def serving(
    config: AppConfig, model_dir: Path, *, keys: tuple[str, ...] = (), drafter: Drafter | None = None
) -> Iterator[tuple[str, Rig]]:
    """Serve until the block ends; yields the address and the rig behind it."""
    grammars = Grammars(open_model(ModelConfig(str(model_dir))), vocab_size=VOCAB_SIZE, eos_token_ids=EOS_TOKEN_IDS)
    rig: Rig | None = None
    server: uvicorn.Server | None = None
    failure: BaseException | None = None
    is_up = threading.Event()

    async def run() -> None:
        nonlocal rig, server
        rig = Rig(grammars=grammars, drafter=drafter)
        app = await make_app(config, LocalRouters(rig), keys=keys)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        is_up.set()
        await task
        await rig.loop.stop()

    def main() -> None:
        nonlocal failure
        try:
            asyncio.run(run())
        except BaseException as error:
            failure = error
            raise
        finally:
            is_up.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    is_up.wait(30)
    try:
        if rig is None or server is None or not server.started:
            raise RuntimeError("the server did not start") from failure
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", rig
    finally:
        if server is not None:
            server.should_exit = True
        thread.join(30)
