"""What happens to requests that outlast the time that a stopped replica has for them."""

import pytest

from deployments.errors import describe
from deployments.ingress import draining
from deployments.ingress.draining import LAST_WORDS_S, end_at_shutdown


@pytest.mark.parametrize(("timeout_s", "told"), [(LAST_WORDS_S + 0.01, "0.01 s"), (LAST_WORDS_S / 2, "0 s")])
async def test_requests_end_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, timeout_s: float, told: str) -> None:
    answers: list[float | None] = [None, None, timeout_s]
    errors: list[Exception] = []

    def serves_own_state() -> float | None:
        assert errors == []
        return answers.pop(0)

    monkeypatch.setattr(draining, "CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(draining, "shutdown_timeout_s", serves_own_state)
    await end_at_shutdown(errors.append)
    assert answers == []
    [error] = errors
    kind, body = describe(error)
    assert (kind.status, body["error"]["code"]) == (503, "unavailable")
    assert body["error"]["message"] == f"the server is shutting down, and the {told} to finish requests are over"
