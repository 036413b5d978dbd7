"""A start's progress is shown on a terminal only, from what Serve and a Router say."""

import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from deployments.cli import progress
from deployments.cli.progress import start_progress
from engine.config import CompileProgress


class FakeServe:
    """Serve, and a Router that compiles; `is_seen` is set when all was asked."""

    def __init__(self, *compiling: CompileProgress | Exception | None) -> None:
        self._statuses = iter(["", "DEPLOYING", "RUNNING"])
        self._compiling = iter(compiling)
        self.is_seen = threading.Event()
        self.compiling = SimpleNamespace(remote=lambda: self)

    def status(self) -> SimpleNamespace:
        status = next(self._statuses)
        return SimpleNamespace(applications={"default": SimpleNamespace(status=status)} if status else {})

    def get_deployment_handle(self, name: str, application: str) -> "FakeServe":
        assert (name, application) == ("Router", "default")
        return self

    def result(self, timeout_s: float) -> CompileProgress | None:
        if (answer := next(self._compiling, None)) is None:
            self.is_seen.set()
        if isinstance(answer, Exception):
            self.is_seen.set()
            raise answer
        return answer


@pytest.mark.parametrize("last", [None, RayError("gone"), TimeoutError()])
def test_a_terminal_shows_loading_and_compiling_below_the_log(
    last: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    fake = FakeServe(CompileProgress(1, 6, 42.4), CompileProgress(2, 6, 30.0), last)
    monkeypatch.setattr(progress, "serve", fake)
    monkeypatch.setattr(progress, "_POLL_S", 0.001)
    shown: list[str] = []

    class Recorder(progress.Progress):
        def update(self, *arguments: Any, **changes: Any) -> None:
            shown.append(changes["description"])
            super().update(*arguments, **changes)

    monkeypatch.setattr(progress, "Progress", Recorder)
    logger = logging.Logger("of the test")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    with start_progress(logger):
        assert fake.is_seen.wait(10)
        logger.warning("a line")
    assert shown == [
        f"serving; compiling passes: {done}" for done in ("1 of 6, about 42 s left", "2 of 6, about 30 s left")
    ]
    assert "a line" in capsys.readouterr().err


def test_elsewhere_nothing_is_asked_or_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "serve", None)
    with start_progress(logging.Logger("of the test")):
        pass
    assert capsys.readouterr().err == ""
