"""CountedOutputs: counts a request when it begins and once more when it ends, whatever ends it."""

from deployments.errors import kind_of
from deployments.ingress.answer import Outputs
from deployments.metrics import IngressMetrics
from engine.sequence import RequestOutput


class CountedOutputs:
    """The outputs of one request; its end is `finished`, `failed` with the error's code, or `aborted` by its client."""

    def __init__(self, outputs: Outputs, metrics: IngressMetrics) -> None:
        """Count the request as started."""
        self._outputs = outputs
        self._metrics = metrics
        self._end = "aborted", ""
        self._is_closed = False
        metrics.observe_started()

    async def next(self) -> list[RequestOutput]:
        """Return the next outputs; an empty list after the last ones.

        Raises:
            Exception: what ended the request.
        """
        try:
            outputs = await self._outputs.next()
        except Exception as error:
            kind = kind_of(error)
            self._end = "failed", kind.code or kind.type
            raise
        if not outputs:
            self._end = "finished", ""
        return outputs

    async def close(self) -> None:
        """End the request, and count its end."""
        if not self._is_closed:
            self._is_closed = True
            self._metrics.observe_ended(*self._end)
        await self._outputs.close()
