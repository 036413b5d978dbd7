"""A conversation: over the application with an engine in this process, and over a server that tells of its rounds."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from deployments.cli.chat_session import VISIBLE, ChatSession
from deployments.config import AppConfig
from tests.deployments.cli.http_stand_in import Request, stand_in
from tests.deployments.serving import serving
from tests.deployments.templates import save_tokenizer


@pytest.fixture(scope="module")
def url(model_dir: Path) -> Iterator[str]:
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny", stream_interval_s=0)
    with serving(config, model_dir) as (url, _):
        yield url


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_elsewhere_than_on_a_terminal_the_text_is_all_that_is_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for speculation in ("on", "off", "1"):
        typed(monkeypatch, f"/speculation {speculation}", "/seed 3", "ab", "", "c")
        ChatSession(url, None, max_tokens=12, temperature=1.0).chat()
        shown.append(capsys.readouterr().out)
    assert shown[0].count("\n") >= 2
    assert "\x1b" not in shown[0]
    assert shown[0] == shown[1] == shown[2]  # the text does not depend on the draft


def test_without_a_template_the_transcript_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(None, tmp_path)
    with serving(AppConfig(target_model=str(tmp_path), served_model_name="tiny"), tmp_path) as (url, _):
        typed(monkeypatch, "ab", "c")
        session = ChatSession(url, None, max_tokens=4, temperature=0.0)
        session.chat()
    captured = capsys.readouterr()
    assert captured.err == "tiny has no chat template: it continues the plain transcript instead\n"
    assert [message["role"] for message in session._messages] == ["user", "assistant"] * 2


class Recorder:
    """A server that answers every question alike, and its requests."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> None:
        if request.command == "GET":
            request.answer(200, b'{"data": [{"id": "m\\u001b[2J"}]}')
            return
        self.bodies.append(body := json.loads(request.body))
        if body["messages"][-1]["content"] == "bad":
            request.answer(400, b'{"error": {"message": "bad \\u001b]2;x\\u0007words"}}')
            return
        rounds = [{"texts": ["yes", "[b]\t", " é "], "accepted": 2, "draft": ["yes", "[b]"], "last": "bonus"}]
        figures = {"draft_acceptance_rate": 0.5, "mean_acceptance_length": 3.0}
        sent = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "yes[b"}, "rounds": rounds}]},
            {"choices": [{"delta": {"content": "]\t é "}}]},
            {"choices": [], "usage": {"completion_tokens": 3}, "metrics": {"speculative_decoding": figures}},
        ]
        request.answer(
            200, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in sent) + b"data: [DONE]\n\n"
        )


def test_a_terminal_shows_origins_and_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    typed(monkeypatch, "one", "/seed 5", "/temperature 0.5", "/speculation 2", "two", "/seed off", "/reset", "three")
    recorder = Recorder()
    with stand_in(recorder) as url:
        ChatSession(url, None, seed=1, temperature=None).chat()
    shown = capsys.readouterr().out
    assert "\x1b[32maccepted draft tokens" in shown
    assert "\x1b[32myes\x1b[0m\x1b[32m[b\x1b[0m\x1b[32m]\t\x1b[0m\x1b[36m é \x1b[0m\n" in shown
    assert "50% of draft tokens accepted, 3.0 tokens a round" in shown
    speculation = {"metrics": "summary", "trace": True}
    asked = [(body.get("seed"), body.get("temperature")) for body in recorder.bodies]
    assert asked == [(1, None), (5, 0.5), (None, 0.5)]
    assert [body["speculative"] for body in recorder.bodies[:2]] == [
        speculation,
        {**speculation, "num_speculative_tokens": 2},
    ]
    assert [len(body["messages"]) for body in recorder.bodies] == [1, 3, 1]
    assert recorder.bodies[1]["messages"][1] == {"role": "assistant", "content": "yes[b]\t é "}


@pytest.mark.parametrize(
    ("line", "message"),
    [("/nothing", "no command /nothing"), ("/seed x", "/seed does not take 'x'"), ("bad", "400: bad ␛]2;x␇words")],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(Recorder()) as url:
        session = ChatSession(url, None)
        typed(monkeypatch, line)
        with pytest.raises(click.ClickException, match=message):
            session.chat()
        typed(monkeypatch, "good", "/quit", "bad")
        session.chat()
    assert [message["content"] for message in session._messages] == ["good", "yes[b]\t é "]


def test_the_model_is_asked_with_the_first_key() -> None:
    keys = []

    def answer(request: Request) -> None:
        keys.append(request.headers["Authorization"])
        request.answer(200, b'{"data": [{"id": "tiny"}]}')

    with stand_in(answer) as url:
        assert ChatSession(url, "one two")._model == ChatSession(url, None)._model == "tiny"
    assert keys == ["Bearer one", None]
    with pytest.raises(click.ClickException, match="`paceline serve` starts a server"):
        ChatSession(url, None)


def test_neither_a_text_nor_a_models_name_can_command_the_terminal() -> None:
    with stand_in(Recorder()) as url:
        assert ChatSession(url, None)._name == "m␛[2J"
    assert "\x1b]52;c;aGk=\x07a\tb\n\x9b".translate(VISIBLE) == "␛]52;c;aGk=␇a\tb\n\ufffd"
