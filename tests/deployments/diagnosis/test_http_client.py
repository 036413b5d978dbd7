import httpx
import pytest

from deployments.diagnosis.http_client import Client, ServerError
from tests.deployments.diagnosis.fake import FakePaceline

BODY = {"prompt": "a", "temperature": 0, "seed": 1, "max_tokens": 8}


def stream_of(content: bytes, status: int = 200) -> Client:
    return Client("http://fake/", transport=httpx.MockTransport(lambda _: httpx.Response(status, content=content)))


def test_a_stream_is_read_to_its_end(server: FakePaceline):
    whole = server.client.post("/v1/completions", BODY)["choices"][0]
    events = list(server.client.stream("/v1/completions", BODY | {"stream": True}))
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == whole["token_ids"]
    assert server.keys == {"Bearer key"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'data: {"a": 1}\n\n', "ended early"), (b'data: {"error": {"message": "lost"}}\n\n', "lost")],
)
def test_a_stream_that_fails_raises(content, message):
    with pytest.raises(ServerError, match=message):
        list(stream_of(content).stream("/x", {}))


def test_a_refusal_and_a_lost_connection_raise(server: FakePaceline):
    with pytest.raises(ServerError, match="status 404") as raised:
        server.client.post("/nowhere", {})
    assert raised.value.status == 404

    def lost(request):
        raise httpx.ConnectError("refused", request=request)

    for call in (lambda client: client.get("/health"), lambda client: list(client.stream("/x", {}))):
        with pytest.raises(ServerError, match="refused"):
            call(Client("http://fake", transport=httpx.MockTransport(lost)))


def test_metrics_are_summed_over_replicas(server: FakePaceline):
    server.metrics = {'a_total{why="x",replica="1"}': 2, 'a_total{why="x",replica="2"}': 3, 'a_total{why="y"}': 1}
    metrics = server.client.metrics()
    assert metrics.by("a_total", "why") == {("x",): 5, ("y",): 1}
    assert (metrics.total("a_total"), metrics.total("b")) == (6, 0)
