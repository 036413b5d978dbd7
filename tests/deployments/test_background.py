"""Tasks that run as long as their replica: an error that ends one does not go unseen."""

import asyncio
import logging

import pytest

from deployments.background import in_background


async def test_an_error_that_ends_a_task_is_logged_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("bug")

    with caplog.at_level(logging.ERROR, "ray.serve"):
        await asyncio.wait([in_background(work(), name="working", loss="nothing is done")])
        await asyncio.sleep(0)
    assert "nothing is done any more" in caplog.text
    assert "ValueError: bug" in caplog.text


async def test_a_task_that_is_stopped_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    task = in_background(asyncio.Event().wait(), name="waiting", loss="nothing is done")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert caplog.text == ""
