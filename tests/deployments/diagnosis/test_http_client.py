import json
from types import SimpleNamespace

import httpx
import pytest

from deployments.diagnosis import http_client
from deployments.diagnosis.http_client import PAUSES_S, Client, ServerError, events
from tests.deployments.cli.http_stand_in import Request, stand_in
from tests.deployments.diagnosis.fake import FakePaceline

EVENTS = [f'id: {nth}\ndata: {{"nth": {nth}}}\n\n'.encode() for nth in range(4)]
DONE = b"id: 4\ndata: [DONE]\n\n"
STREAMED = {"prompt": "a", "stream": True}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before tries, which take no time."""
    slept: list[float] = []
    monkeypatch.setattr(http_client, "time", SimpleNamespace(sleep=slept.append))  # not of other threads
    return slept


def resuming(url: str) -> Client:
    return Client(url, pauses_s=PAUSES_S)


def test_a_refusal_and_a_lost_connection_raise(server: FakePaceline):
    with pytest.raises(ServerError, match="404: no such route") as raised:
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


def refusal(request: Request, status: int, message: str) -> None:
    request.answer(status, json.dumps({"error": {"message": message}}).encode())


def test_a_lost_connection_is_continued_after_the_last_event(
    pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str | None, bytes]] = []

    def answer(request: Request) -> None:
        seen.append((request.headers["Last-Event-ID"], request.body))
        match len(seen):
            case 1:
                request.answer(200, EVENTS[0] + EVENTS[1] + EVENTS[2][:9], length=1000)
            case 2:
                refusal(request, 503, "starting")
            case 3:
                request.answer(200, EVENTS[2])  # ended well, but before its end
            case _:
                request.answer(200, EVENTS[3] + DONE)

    with stand_in(answer) as url:
        assert [event["nth"] for event in resuming(url).stream("/v1/completions", STREAMED)] == [0, 1, 2, 3]
    assert [last for last, _ in seen] == [None, "1", "1", "2"]
    assert len({body for _, body in seen}) == 1
    assert pauses == [0.5, 1.0, 0.5]  # an event gives all tries back
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "503: starting; continuing in 1 s" in told[1]


def test_tries_end(pauses: list[float]) -> None:
    with stand_in(lambda request: request.answer(200, EVENTS[0], length=1000)) as url:
        got = resuming(url).stream("/v1/completions", STREAMED)
        assert next(got) == {"nth": 0}
    with pytest.raises(ServerError, match="refused"):
        next(got)
    assert pauses == [*PAUSES_S]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, b'{"error": {"message": "seed is -1"}}', "400: seed is -1"),
        (502, b"<html>", "502: <html>"),
        (200, b'data: {"nth": 1}\n\n', "ended early"),  # without an id nothing can be continued
        (200, b'data: {"error": {"message": "lost"}}\n\n', "lost"),
        (200, b'id: 7\ndata: {"error": {"message": "the target was lost"}}\n\n', "the target was lost"),
    ],
)
def test_what_cannot_be_continued_is_one_error(status: int, content: bytes, message: str, pauses: list[float]) -> None:
    with stand_in(lambda request: request.answer(status, content)) as url, pytest.raises(ServerError, match=message):
        list(resuming(url).stream("/v1/completions", STREAMED))
    assert pauses == []


def test_an_event_ends_at_an_empty_line_whatever_the_pieces() -> None:
    text = 'id: a\r\ndata: {"x": "\u2028é"}\r\n\r\n: still here\n\ndata:1\n\n'.encode()
    for size in (1, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert [*events(pieces)] == [("a", '{"x": "\u2028é"}'), ("a", "1")]
