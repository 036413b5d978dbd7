"""Every request that was counted at its start is counted once at its end, under what ended it."""

import asyncio

import pytest

from deployments.ingress.counted_outputs import CountedOutputs
from deployments.metrics import IngressMetrics
from engine.errors import QueueFullError
from engine.sequence import RequestOutput

OUTPUT = RequestOutput("request-0", [1], "x", "length", None, None, 3, 0, 0, 0)


class Outputs:
    """One output; then an error, or the end, or nothing for ever."""

    def __init__(self, error: Exception | None = None, *, is_silent: bool = False) -> None:
        self._outputs = [[OUTPUT]]
        self._error = error
        self._is_silent = is_silent

    async def next(self) -> list[RequestOutput]:
        if self._outputs:
            return self._outputs.pop()
        if self._is_silent:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        return []

    async def close(self) -> None:
        pass


def counts(metrics: IngressMetrics) -> dict[tuple[str, str], float]:
    samples = [sample for metric in metrics.collect() for sample in metric.samples]
    [started] = [sample.value for sample in samples if sample.name == "paceline:requests_started_total"]
    ended = {
        (sample.labels["outcome"], sample.labels["reason"]): sample.value
        for sample in samples
        if sample.name == "paceline:requests_ended_total"
    }
    assert started == 1
    return ended


async def test_a_request_whose_last_outputs_came_is_finished():
    metrics = IngressMetrics("tiny")
    outputs = CountedOutputs(Outputs(), metrics)
    assert counts(metrics) == {}
    assert await outputs.next() == [OUTPUT]
    assert await outputs.next() == []
    await outputs.close()
    await outputs.close()
    assert counts(metrics) == {("finished", ""): 1}


async def test_a_request_that_got_an_error_has_failed_for_its_reason():
    metrics = IngressMetrics("tiny")
    outputs = CountedOutputs(Outputs(QueueFullError("full")), metrics)
    await outputs.next()
    with pytest.raises(QueueFullError):
        await outputs.next()
    await outputs.close()
    assert counts(metrics) == {("failed", "queue_full"): 1}


async def test_a_request_that_is_closed_before_its_end_was_aborted():
    metrics = IngressMetrics("tiny")
    outputs = CountedOutputs(Outputs(is_silent=True), metrics)
    await outputs.next()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await outputs.next()
    await outputs.close()
    assert counts(metrics) == {("aborted", ""): 1}
