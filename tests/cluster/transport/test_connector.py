"""How the Router reaches its workers through the package's public names."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from cluster.transport import ConnectionLostError, Connector, DeadlineError, Server, listen
from tests.cluster.wire import ping, pong


@contextlib.contextmanager
def worker(connector: Connector, *, node_id: str = "node 1") -> Iterator[Server]:
    server = listen("127.0.0.1", node_id=node_id, client_identity=connector.identity)
    thread = threading.Thread(target=server.serve, args=(pong,))
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(10)


@pytest.mark.parametrize(("node_id", "kind"), [("node 1", "unix"), ("node 2", "tls")])
async def test_the_node_decides_between_unix_socket_and_tls(node_id: str, kind: str) -> None:
    """The path of another node's socket may exist here too, and belong to another process."""
    connector = Connector("node 1")
    with worker(connector, node_id=node_id) as server:
        assert server.endpoint.node_id == node_id
        assert server.endpoint.path
        link = connector.connect(server.endpoint, version=3)
        assert (await link.call(ping(1, version=3))).round == 1
        transport = link._connection._transport
        assert (transport.get_extra_info("ssl_object") is None) == (kind == "unix")
        link.close()


async def test_another_connector_is_not_accepted() -> None:
    with worker(Connector("node 1")) as server:
        link = Connector("node 2").connect(server.endpoint, version=1)
        with pytest.raises((DeadlineError, ConnectionLostError)):
            await link.call(ping(1, deadline_s=0.3))
        link.close()


async def test_a_break_is_reported_to_the_callback() -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    connector = Connector("node 1")
    with worker(connector) as server:
        link = connector.connect(server.endpoint, version=1, on_break=reasons.put_nowait)
        await link.call(ping(1))
    assert await asyncio.wait_for(reasons.get(), 10)
    link.close()
