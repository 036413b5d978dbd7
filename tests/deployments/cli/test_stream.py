"""A stream whose connection is lost is continued with the same request, or ends with one line that says why."""

import json

import pytest

from deployments.cli import stream as module
from deployments.cli.stream import events, served_model, stream
from deployments.cli.terminal import CommandError
from tests.deployments.cli.http_stand_in import Request, stand_in

EVENTS = [f'id: {nth}\ndata: {{"nth": {nth}}}\n\n'.encode() for nth in range(4)]
DONE = b"id: 4\ndata: [DONE]\n\n"
BODY = {"prompt": "a", "stream": True}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before tries, which take no time."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


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
        assert [event["nth"] for event in stream(url, "/v1/completions", BODY)] == [0, 1, 2, 3]
    assert [last for last, _ in seen] == [None, "1", "1", "2"]
    assert len({body for _, body in seen}) == 1
    assert pauses == [0.5, 1.0, 0.5]  # an event gives all tries back
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "503: starting; continuing in 1 s" in told[1]


def test_tries_end(pauses: list[float]) -> None:
    with stand_in(lambda request: request.answer(200, EVENTS[0], length=1000)) as url:
        got = stream(url, "/v1/completions", BODY)
        assert next(got) == {"nth": 0}
    with pytest.raises(CommandError, match="refused"):
        next(got)
    assert pauses == [*module.PAUSES_S]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, b'{"error": {"message": "seed is -1"}}', "400: seed is -1"),
        (503, b'{"error": {"message": "starting"}}', "503: starting"),
        (502, b"<html>", "502: <html>"),
        (200, b'data: {"nth": 1}\n\n', "cut the answer off"),  # without an id nothing can be continued
        (200, b'id: 7\ndata: {"error": {"message": "the target was lost"}}\n\n', "the target was lost"),
    ],
)
def test_what_cannot_be_continued_is_one_error(status: int, content: bytes, message: str, pauses: list[float]) -> None:
    with stand_in(lambda request: request.answer(status, content)) as url, pytest.raises(CommandError, match=message):
        list(stream(url, "/v1/completions", BODY))
    assert pauses == []


def test_an_event_ends_at_an_empty_line_whatever_the_pieces() -> None:
    text = 'id: a\r\ndata: {"x": "\u2028é"}\r\n\r\n: still here\n\ndata:1\n\n'.encode()
    for size in (1, 7, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert [*events(pieces)] == [("a", '{"x": "\u2028é"}'), ("a", "1")]


def test_the_model_is_asked_with_the_first_key() -> None:
    keys = []

    def answer(request: Request) -> None:
        keys.append(request.headers["Authorization"])
        request.answer(200, b'{"data": [{"id": "tiny"}]}')

    with stand_in(answer) as url:
        assert served_model(url, "one two") == served_model(url) == "tiny"
    assert keys == ["Bearer one", None]
    with pytest.raises(CommandError, match="`paceline serve` starts a server"):
        served_model(url)
