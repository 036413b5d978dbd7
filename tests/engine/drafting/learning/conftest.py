"""Which texts are held out does not change from run to run."""

import pytest

from engine.drafting.learning import lessons


@pytest.fixture(autouse=True)
def _same_texts_are_held_out(monkeypatch):
    monkeypatch.setattr(lessons.secrets, "token_bytes", lambda _: b"")
