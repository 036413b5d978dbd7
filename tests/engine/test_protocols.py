"""Requests, rows and drafts: who sees later tokens, and what a row says about its pass."""

import pytest

from engine.protocols import run_in_process


def test_work_in_process_runs_to_its_end_but_may_not_wait():
    def passes():
        yield
        yield
        return 5

    class Waiting:
        def __await__(self):
            yield self

    async def waits():
        await Waiting()

    assert run_in_process(passes()) == 5
    with pytest.raises(RuntimeError, match="must only compute"):
        run_in_process(waits())
